"""The request with which a branch of a session goes on."""

from typing import Any

import pytest

from midstream.proxy.coordinator import SessionFacts
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.branching import branch_of
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
        ({"use_beam_search": True}, "beam_search"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(Refused, match=told):
        branch_of(parent(), CHILD, changes)


def test_a_request_that_wants_no_logprobs_can_branch() -> None:
    assert branch_of(parent(logprobs=False), CHILD, {}).body["logprobs"] is False
    assert "logprobs" not in branch_of(parent(logprobs=3), CHILD, {"logprobs": None}).body


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
