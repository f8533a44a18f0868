"""The judge of `verify`: nothing but an identical answer beside agreeing controls is proof, and every fault is one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.loadtest.client import HALF_A_CHARACTER, Answer
from midstream.loadtest.verify.judge import (
    ADVICE,
    Interruption,
    Reading,
    Settling,
    Verdict,
    difference,
    judge,
    settling,
    spread,
)

TOKENS = st.lists(st.integers(0, 5), min_size=1, max_size=12).map(tuple)
EXACT = Interruption("exact")
# What a real answer to three tokens looks like.
GOOD = Reading((1, 2, 3), "one two three", (-0.1, -0.2, -0.3), "length", (5, 3))


def reading(tokens: tuple[int, ...]) -> Reading:
    return Reading(tokens, " ".join(map(str, tokens)), (), "length", (5, len(tokens)))


readings = TOKENS.map(reading)
interruptions = st.builds(
    Interruption,
    st.sampled_from(["", "exact", "recomputed", "restarted", "refused"]),
    had=st.integers(0, 12),
    kept=st.integers(0, 12),
)


def verdict(*controls: Reading, got: Reading, how: Settling = Settling.GREEDY, what: Interruption = EXACT) -> Verdict:
    return judge(controls, got, how, what).verdict


@given(st.lists(readings, min_size=2, max_size=4), readings, st.sampled_from(Settling), interruptions)
def test_nothing_passes_but_an_exact_answer_that_equals_controls_which_agree(
    controls: list[Reading], got: Reading, how: Settling, what: Interruption
) -> None:
    passed = verdict(*controls, got=got, how=how, what=what) is Verdict.IDENTICAL
    assert passed == (what.outcome == "exact" and all(control == got for control in controls))


@given(st.lists(readings, min_size=2, max_size=4), readings, st.sampled_from(Settling), interruptions)
def test_nothing_whole_fails_unless_controls_agree_and_the_settings_can_settle_it(
    controls: list[Reading], got: Reading, how: Settling, what: Interruption
) -> None:
    told = judge(controls, got, how, what)
    if told.verdict is Verdict.RESTORE:
        assert len(set(controls)) == 1
        assert how is not Settling.UNSEEDED
        assert got not in controls
        assert told.difference is not None


@given(readings, readings, st.sampled_from([Settling.GREEDY, Settling.SEEDED]))
def test_an_exact_answer_that_differs_from_controls_which_agree_is_a_failure(
    control: Reading, got: Reading, how: Settling
) -> None:
    wanted = Verdict.IDENTICAL if got == control else Verdict.RESTORE
    assert verdict(control, control, got=got, how=how) is wanted


@given(TOKENS, TOKENS)
def test_the_first_differing_token_is_the_first_that_differs(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    found = difference(reading(one), reading(other))
    if one == other:
        assert found is None
        return
    assert found is not None
    assert found.first is not None
    assert one[: found.first] == other[: found.first]
    assert one[found.first : found.first + 1] != other[found.first : found.first + 1]
    assert 0 < found.share <= 1


@pytest.mark.parametrize(
    "other",
    [
        replace(GOOD, text="one two  three"),
        replace(GOOD, logprobs=(-0.1, -0.2, -0.30001)),
        replace(GOOD, finish="stop"),
        replace(GOOD, usage=(5, 4)),
        replace(GOOD, tokens=(1, 2, 4)),
    ],
)
def test_every_field_that_a_reader_can_see_counts(other: Reading) -> None:
    assert verdict(GOOD, GOOD, got=GOOD) is Verdict.IDENTICAL
    assert verdict(GOOD, GOOD, got=other) is Verdict.RESTORE


def test_what_differs_like_undisturbed_runs_do_is_variance_and_says_how_much() -> None:
    controls = (reading((1, 2, 3, 4)), reading((1, 2, 3, 5)))
    told = judge(controls, reading((1, 2, 9, 4)), Settling.GREEDY, EXACT)
    assert told.verdict is Verdict.VARIANCE
    assert told.why == ADVICE[Settling.GREEDY]
    assert told.difference is not None
    assert (told.difference.first, told.difference.wanted, told.difference.got) == (2, 3, 9)
    apart = spread(controls)
    assert (apart.agree, apart.distinct, apart.first, apart.share) == (False, 2, 3, 0.25)


def test_an_answer_that_equals_one_of_two_controls_which_differ_settles_nothing() -> None:
    one, other = reading((1, 2, 3)), reading((1, 2, 4))
    assert verdict(one, other, got=other) is Verdict.UNSETTLED


def test_unseeded_sampling_settles_nothing_and_says_what_to_set() -> None:
    told = judge((reading((1,)), reading((2,))), reading((3,)), Settling.UNSEEDED, EXACT)
    assert told.verdict is Verdict.UNSETTLED
    assert "seed" in told.why


def test_a_difference_before_the_interruption_is_not_the_restores() -> None:
    controls = (reading((1, 2, 3, 4)),) * 2
    got = reading((1, 9, 3, 4))
    assert verdict(*controls, got=got, what=Interruption("exact", had=2)) is Verdict.VARIANCE
    assert verdict(*controls, got=got, what=Interruption("exact", had=1)) is Verdict.RESTORE


@pytest.mark.parametrize("outcome", ["recomputed", "restarted"])
def test_what_the_sidecar_calls_less_than_exact_is_no_proof_even_where_it_is_identical(outcome: str) -> None:
    assert verdict(GOOD, GOOD, got=GOOD, what=Interruption(outcome, kept=3)) is Verdict.RECOMPUTED
    assert verdict(GOOD, GOOD, got=replace(GOOD, tokens=(1, 2, 9)), what=Interruption(outcome, kept=2)) is (
        Verdict.RECOMPUTED
    )


def test_a_token_that_was_kept_and_is_gone_is_a_failure_even_of_a_recomputed_answer() -> None:
    torn = replace(GOOD, tokens=(1, 3, 3))
    assert verdict(GOOD, GOOD, got=torn, what=Interruption("recomputed", kept=2)) is Verdict.RESTORE
    assert verdict(GOOD, GOOD, got=torn, what=Interruption("recomputed", had=2, kept=2)) is Verdict.RECOMPUTED


def test_a_broken_answer_is_a_failure_whatever_it_calls_itself() -> None:
    broken = replace(GOOD, faults=("a second usage",))
    for outcome in ("exact", "recomputed", ""):
        told = judge((GOOD, GOOD), broken, Settling.GREEDY, Interruption(outcome))
        assert told.verdict is Verdict.RESTORE
        assert "a second usage" in told.why
    assert verdict(GOOD, GOOD, got=broken, what=Interruption("refused")) is Verdict.REFUSED


def test_an_answer_that_nobody_interrupted_is_missed() -> None:
    assert verdict(GOOD, GOOD, got=GOOD, what=Interruption("")) is Verdict.MISSED


def test_there_is_no_verdict_without_two_whole_controls() -> None:
    with pytest.raises(ValueError, match="two controls"):
        judge((GOOD,), GOOD, Settling.GREEDY, EXACT)
    with pytest.raises(ValueError, match="whole"):
        judge((GOOD, replace(GOOD, faults=("half",))), GOOD, Settling.GREEDY, EXACT)


@pytest.mark.parametrize(
    ("body", "how"),
    [
        ({"temperature": 0}, Settling.GREEDY),
        ({"temperature": 0.0, "seed": 3}, Settling.GREEDY),
        ({"top_k": 1}, Settling.GREEDY),
        ({"temperature": 0.8, "seed": 0}, Settling.SEEDED),
        ({"seed": 7}, Settling.SEEDED),
        ({}, Settling.UNSEEDED),
        ({"temperature": None, "seed": None}, Settling.UNSEEDED),
        ({"temperature": 0.1}, Settling.UNSEEDED),
    ],
)
def test_what_a_request_says_of_its_sampling_decides_whether_it_can_be_settled(
    body: dict[str, object], how: Settling
) -> None:
    assert settling(body) is how


def test_a_reading_keeps_what_was_wrong_with_an_answer() -> None:
    answer = Answer(status=200, text="a", token_ids=[1], finish="stop", usage={"prompt_tokens": 2}, done=True)
    assert Reading.of(answer) == Reading((1,), "a", (), "stop", (2, None))
    assert Reading.of(Answer(error={"code": "x"})).faults == ("error: {'code': 'x'}",)
    assert Reading.of(Answer(done=True)).faults == ("it did not end well",)
    assert Reading.of(Answer(violations=["a second role"])).faults == ("a second role",)


def test_half_a_character_is_the_restore_s_only_where_undisturbed_runs_have_none() -> None:
    broken = Answer(
        status=200, text="a\ufffdb", token_ids=[1, 2], finish="stop", violations=[HALF_A_CHARACTER], done=True
    )  # fmt: skip
    half = Reading.of(broken)
    assert half.faults == ()
    assert judge((half, half), half, Settling.GREEDY, EXACT).verdict is Verdict.IDENTICAL
    whole = replace(half, half=False)
    assert judge((whole, whole), half, Settling.GREEDY, EXACT).verdict is Verdict.RESTORE
    assert judge((half, half), whole, Settling.GREEDY, EXACT).verdict is Verdict.RESTORE
