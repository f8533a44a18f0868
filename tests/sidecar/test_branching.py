"""The request with which a branch of a session goes on."""

from typing import Any

import pytest

from midstream.proxy.coordinator import SessionFacts
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.branching import branch_of, require_beginning
from midstream.sidecar.past import BYTES_MAX, SESSIONS_MAX, Past, PastSessions

PARENT = SessionId("5" * 32)
CHILD = SessionId("6" * 32)


def parent(seed: int | None = 7, **body: Any) -> SessionFacts:
    return SessionFacts(PARENT, "/v1/completions", {"prompt": "x", "max_tokens": 9, **body}, stream=False, seed=seed)


def test_a_branch_is_streamed_and_has_its_parents_request_and_seed() -> None:
    branch = branch_of(parent(), CHILD, {})
    assert branch.body == {"prompt": "x", "max_tokens": 9, "stream": True}
    assert (branch.session, branch.parent, branch.seed, branch.stream) == (CHILD, PARENT, 7, True)


def test_fields_may_be_set_and_taken_away() -> None:
    branch = branch_of(parent(stop="END"), CHILD, {"temperature": 1.2, "stop": None, "seed": 3})
    assert branch.body == {"prompt": "x", "max_tokens": 9, "stream": True, "temperature": 1.2, "seed": 3}
    assert branch.seed is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prompt": "y"}, "prompt cannot be set"),
        ({"n": 2, "model": "m"}, "model, n cannot be set"),
        ({"logprobs": 3}, "logprobs=null"),
        # Of completions: those of the sampled tokens, and none beside them.
        ({"logprobs": 0}, "logprobs=null"),
        ({"logprobs": True}, "logprobs=null"),
        ({"use_beam_search": True}, "a request with 'beam_search' cannot"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=told):
        branch_of(parent(), CHILD, changes)


def test_a_request_that_wants_no_logprobs_can_branch() -> None:
    assert branch_of(parent(logprobs=False), CHILD, {}).body["logprobs"] is False
    assert "logprobs" not in branch_of(parent(logprobs=3), CHILD, {"logprobs": None}).body


@pytest.mark.parametrize(
    ("body", "at", "finish", "told"),
    [
        ({}, 0, "", "give --at 1 to 8"),
        ({}, 9, "", "give --at 1 to 8"),
        ({}, 8, "stop", "its end with output 8; give --at 1 to 7"),
        ({"max_tokens": 5}, 6, "", "max_tokens of 5 leaves nothing to write after 6 outputs"),
        ({"max_tokens": 5}, 5, "", "max_tokens of 5 leaves nothing to write after 5 outputs"),
        ({"max_tokens": 5, "max_completion_tokens": 30}, 6, "", "max_tokens of 5"),
        ({"max_tokens": None}, 8, "length", "add --set max_tokens=N"),
    ],
)
def test_a_branch_that_could_write_nothing_is_refused(body: dict[str, Any], at: int, finish: str, told: str) -> None:
    with pytest.raises(Refused, match=told):
        require_beginning(branch_of(parent(), CHILD, body), at, 8, finish)


@pytest.mark.parametrize(
    ("body", "at", "finish"), [({}, 8, ""), ({}, 7, "stop"), ({}, 8, "length"), ({"max_tokens": None}, 7, "length")]
)
def test_a_branch_that_has_something_to_write_may_begin(body: dict[str, Any], at: int, finish: str) -> None:
    require_beginning(branch_of(parent(), CHILD, body), at, 8, finish)


def test_the_oldest_sessions_are_forgotten() -> None:
    past = PastSessions()
    for number in range(SESSIONS_MAX + 1):
        facts = SessionFacts(SessionId(f"{number:032x}"), "/v1/completions", {}, stream=True)
        past.add(Past(facts, (1,), "w0", None))
    assert past.get(SessionId(f"{0:032x}")) is None
    assert past.get(SessionId(f"{SESSIONS_MAX:032x}")) is not None


def test_large_requests_are_remembered_within_bounds() -> None:
    past = PastSessions()
    third = "x" * (BYTES_MAX // 3)
    ids = [SessionId(f"{number:032x}") for number in range(4)]
    for session in ids:
        past.add(Past(SessionFacts(session, "/v1/completions", {"prompt": third}, stream=True), (), "w0", None))
    assert [past.get(session) is not None for session in ids] == [False, False, True, True]
    huge = SessionFacts(CHILD, "/v1/completions", {"prompt": third * 4}, stream=True)
    past.add(Past(huge, (), "w0", None))
    assert past.get(CHILD) is None
    assert past.get(ids[3]) is not None
