"""Markers as the plugin reads them, without an engine: what is believed, and what is left of what is not."""

from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm.marking import checked_marker, ending_of, re_enter_outputs, resumed_outputs
from midstream.adapters.vllm.replay import taken_in
from midstream.session.marker import KvSource, Marker, Resume, with_marker

SESSION = "0123456789abcdef" * 2
MODEL = SimpleNamespace(max_model_len=20, get_vocab_size=lambda: 100)


class Request(SimpleNamespace):
    """As much of vLLM's request as the plugin touches."""

    def append_output_token_ids(self, ids: list[int]) -> None:
        self.outputs = [*self.outputs, *ids]


def request(outputs: tuple[int, ...], *, max_tokens: int | None = 8, prompt_len: int = 4, finish: str = "") -> Any:
    marker = Marker(SESSION, 2, Resume(outputs, KvSource.HELD, "0" * 32, finish))  # type: ignore[arg-type]
    params = SimpleNamespace(extra_args=with_marker({}, marker), max_tokens=max_tokens)
    return Request(sampling_params=params, prompt_token_ids=[1] * prompt_len, outputs=[], prefill_stats=1)


def test_old_outputs_become_outputs_of_the_new_request() -> None:
    resumed = request((5, 6))
    marker = re_enter_outputs(resumed, MODEL)
    assert marker is not None
    assert resumed.outputs == [5, 6]
    assert resumed.prefill_stats is None
    assert resumed_outputs(resumed.sampling_params) == [5, 6]


@pytest.mark.parametrize(
    ("outputs", "limits"),
    [((100,), {}), ((1,) * 9, {}), ((1,) * 17, {"max_tokens": None}), ((1,) * 5, {"prompt_len": 16, "max_tokens": 50})],
)
def test_a_marker_that_cannot_be_true_is_refused_and_no_worker_sees_it(
    outputs: tuple[int, ...], limits: dict[str, Any]
) -> None:
    refused = request(outputs, **limits)
    with pytest.raises(ValueError, match="marker:"):
        re_enter_outputs(refused, MODEL)
    assert refused.outputs == []
    assert resumed_outputs(refused.sampling_params) == []


@pytest.mark.parametrize(
    ("count", "limits", "ending"),
    [
        (7, {}, ""),
        (8, {}, "length"),
        (3, {"finish": "stop"}, "stop"),
        (8, {"finish": "stop"}, "stop"),
        (15, {"max_tokens": None}, ""),
        (16, {"max_tokens": None}, "length"),
        (4, {"prompt_len": 16, "max_tokens": 50}, "length"),
    ],
)
def test_an_answer_ends_where_the_request_or_the_context_ends(count: int, limits: dict[str, Any], ending: str) -> None:
    resumed = request((1,) * count, **limits)
    marker = checked_marker(resumed, MODEL)
    assert marker is not None
    assert marker.resume is not None
    assert ending_of(resumed, marker.resume, MODEL) == ending


@pytest.mark.parametrize("extra", [None, {}, {"kv_transfer_params": None}, {"kv_transfer_params": "x"}])
def test_a_request_without_a_marker_is_left_alone(extra: dict[str, Any] | None) -> None:
    plain = Request(sampling_params=SimpleNamespace(extra_args=extra, max_tokens=1), prompt_token_ids=[], outputs=[])
    assert re_enter_outputs(plain, MODEL) is None
    assert plain.outputs == []


def test_a_seed_in_the_marker_is_the_requests_own_where_it_has_none() -> None:
    for asked, given, taken in ((None, 7, 7), (5, 7, 5), (None, None, None), (None, 0, 0)):
        first = request(())
        first.sampling_params.extra_args = with_marker({}, Marker(SESSION, 1, seed=given))  # type: ignore[arg-type]
        first.sampling_params.seed = asked
        assert taken_in(first, MODEL) is None
        assert first.sampling_params.seed == taken
