"""Of which samplers the draws are known, and what a generator on a GPU is set to."""

import sys
import types
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm import generators
from midstream.adapters.vllm.generators import VOCABULARY_MAX, adopt_generator, draws_are_known


class OneRandint:
    """As 0.32 samples on the CPU."""

    def forward_cpu(self, q: Any) -> Any:
        return q.randint()


class Exponentials:
    """As 0.25 does there."""

    def forward_cpu(self, q: Any) -> Any:
        return q.exponential_()


def row_by_row(q: Any, generators: dict[int, Any]) -> None:
    for i, generator in generators.items():
        q[i].exponential_(generator=generator)


def all_at_once(q: Any, generators: dict[int, Any]) -> None:
    q.exponential_(generator=generators[0])


@pytest.mark.parametrize(
    ("device", "sampler", "random_sample", "vocabulary", "known"),
    [
        ("cpu", OneRandint, all_at_once, 300_000, True),
        ("cpu", Exponentials, row_by_row, 100, False),
        ("cuda", Exponentials, row_by_row, VOCABULARY_MAX, True),
        ("cuda", Exponentials, row_by_row, VOCABULARY_MAX + 1, False),
        ("cuda", Exponentials, all_at_once, 100, False),
        ("xpu", OneRandint, row_by_row, 100, False),
    ],
)
def test_the_draws_of_these_samplers_are_known(
    monkeypatch: pytest.MonkeyPatch, device: str, sampler: Any, random_sample: Any, vocabulary: int, known: bool
) -> None:
    ops = types.ModuleType("ops")
    ops.topk_topp_sampler = SimpleNamespace(  # type: ignore[attr-defined]
        TopKTopPSampler=sampler, random_sample=random_sample
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.ops", ops)
    config = SimpleNamespace(
        use_v2_model_runner=False,
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(get_vocab_size=lambda: vocabulary),
    )
    assert draws_are_known(config) == known
    config.use_v2_model_runner = True
    assert draws_are_known(config)


class Generator:
    """One of a device."""

    def __init__(self, kind: str) -> None:
        self.device = SimpleNamespace(type=kind)
        self.offset = 0

    def set_offset(self, offset: int) -> None:
        self.offset = offset


def state(kind: str | None, outputs: list[int]) -> Any:
    return SimpleNamespace(generator=None if kind is None else Generator(kind), output_token_ids=outputs)


def test_a_generator_on_a_gpu_stands_behind_the_draws_of_all_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "_offset_of_row", lambda device: 4)
    resumed, new = state("cuda", [5, 6, 7]), state("cuda", [])
    adopt_generator(resumed)
    adopt_generator(new)
    adopt_generator(state(None, [1]))
    assert (resumed.generator.offset, new.generator.offset) == (12, 0)


@pytest.mark.parametrize(("kind", "moved"), [("cuda", 8), ("xpu", 4)])
def test_where_a_draw_is_something_else_it_is_reported(monkeypatch: pytest.MonkeyPatch, kind: str, moved: int) -> None:
    monkeypatch.setattr(generators, "_offset_of_row", lambda device: moved)
    with pytest.raises(NotImplementedError):
        adopt_generator(state(kind, [5]))
    adopt_generator(state(kind, []))
