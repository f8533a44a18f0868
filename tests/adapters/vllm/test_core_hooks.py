"""A grammar that is made for a session that goes on stands where it stood: after the outputs that it has governed."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm.core_hooks import _advanced_grammar

THINK_END = 7


class Grammar:
    """Accepts rising numbers, and remembers them."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        self.accepted += tokens
        return list(tokens) == sorted(tokens)


class Manager:
    """vLLM's, as far as it tells thoughts from what a grammar governs."""

    def __init__(self, *, thinks: bool) -> None:
        self.reasoner_cls = object if thinks else None
        self.grammar = Grammar()

    def _get_constraint_bounds(
        self, request: Any, tokens: Sequence[int], spec_tokens_committed: bool = False
    ) -> tuple[int, int]:
        assert spec_tokens_committed, "the outputs are the request's own already"
        if request.structured_output_request.reasoning_ended:
            return 0, 0
        end = tokens.index(THINK_END) + 1 if THINK_END in tokens else len(tokens) + 1
        return end, end


class ManagerOf025:
    """The same of 0.25, which asks its parser at every step, and never for more than that."""

    def __init__(self, *, thinks: bool, in_reasoning: bool = False) -> None:
        self.reasoner_cls = object if thinks else None
        self.grammar = Grammar()
        self._in_reasoning = in_reasoning

    def should_fill_bitmask(self, request: Any) -> bool:
        return self._in_reasoning or bool(request.structured_output_request.reasoning_ended)

    def _get_reasoner(self, request: Any) -> Any:
        return self

    def is_reasoning_end_streaming(self, known: Sequence[int], delta: Sequence[int]) -> bool:
        assert list(known[-1:]) == list(delta)
        return THINK_END in delta


def request(outputs: Sequence[int], *, ended: bool = False) -> Any:
    """A request that re-enters outputs."""
    resume = {"outputs": list(outputs), "kv": "none", "prompt_hash": "0" * 32, "finish": ""}
    marker = {"v": 1, "session": "ab" * 16, "generation": 2, "resume": resume}
    params = SimpleNamespace(extra_args={"kv_transfer_params": {"midstream": marker}} if outputs else {})
    return SimpleNamespace(
        request_id="r",
        prompt_token_ids=[THINK_END, 5],
        sampling_params=params,
        structured_output_request=SimpleNamespace(reasoning_ended=ended),
    )


def made(manager: "Manager | ManagerOf025", of: Any) -> list[int]:
    """What the grammar of a request was advanced over."""
    grammar = _advanced_grammar(lambda self, request: self.grammar)(manager, of)
    assert grammar is manager.grammar
    return manager.grammar.accepted


def test_without_thoughts_it_is_advanced_over_all_outputs() -> None:
    assert made(Manager(thinks=False), request([1, 2, 3])) == [1, 2, 3]


def test_of_a_new_request_it_is_at_its_beginning() -> None:
    assert made(Manager(thinks=True), request([])) == []
    assert made(Manager(thinks=False), request([])) == []


@pytest.mark.parametrize("kind", [Manager, ManagerOf025])
def test_thoughts_are_nothing_to_it(kind: "type[Manager | ManagerOf025]") -> None:
    thinking = request([9, 3, 8])
    assert made(kind(thinks=True), thinking) == []
    assert thinking.structured_output_request.reasoning_ended is False
    done = request([9, 3, THINK_END, 1, 2])
    assert made(kind(thinks=True), done) == [1, 2]
    assert done.structured_output_request.reasoning_ended is True
    just_done = request([9, 3, THINK_END])
    assert made(kind(thinks=True), just_done) == []
    assert just_done.structured_output_request.reasoning_ended is True


def test_a_prompt_that_ends_the_thoughts_leaves_all_outputs_to_it() -> None:
    assert made(Manager(thinks=True), request([1, 2], ended=True)) == [1, 2]
    assert made(ManagerOf025(thinks=True), request([1, 2], ended=True)) == [1, 2]


def test_a_grammar_that_governs_thoughts_too_is_advanced_over_all_outputs() -> None:
    assert made(ManagerOf025(thinks=True, in_reasoning=True), request([1, 2, THINK_END])) == [1, 2, THINK_END]


def test_outputs_that_it_does_not_accept_fail_the_request() -> None:
    with pytest.raises(ValueError, match="does not accept the outputs"):
        made(Manager(thinks=False), request([3, 1]))


def test_a_manager_that_cannot_say_where_thoughts_end_fails_the_request() -> None:
    with pytest.raises(ValueError, match="does not accept the outputs"):
        _advanced_grammar(lambda self, request: Grammar())(SimpleNamespace(reasoner_cls=object), request([1]))
