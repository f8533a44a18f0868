"""How exact a session has to be, as clients ask for it: refused beforehand, or at a takeover, or done otherwise."""

from typing import Any

import pytest
from multidict import CIMultiDict

from midstream.proxy.policy import Policy, policy_of
from midstream.proxy.settings import ProxySettings
from midstream.session.errors import Refused
from midstream.session.marker import KvSource
from support.answers import Answer
from support.proxying import proxied
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(8)
OBSTACLE = {"prompt_embeds": "AAAA"}


def two(first: Script) -> ScriptedCoordinator:
    """A worker that fails and one that does not."""
    return ScriptedCoordinator(ScriptedEngine(ANSWER, first, name="a"), ScriptedEngine(ANSWER, name="b"))


@pytest.mark.parametrize("word", ["exact", " EXACT ", "Exact"])
def test_a_policy_is_read_whatever_its_case(word: str) -> None:
    assert policy_of({"X-Midstream-Policy": word}, Policy.OFF) is Policy.EXACT


def test_a_request_without_a_word_gets_the_deployments_policy() -> None:
    assert policy_of({}, Policy.OFF) is Policy.OFF


def test_a_policy_that_is_asked_for_twice_must_be_the_same_one() -> None:
    name = "X-Midstream-Policy"
    assert policy_of(CIMultiDict([(name, "exact"), (name, "EXACT")]), Policy.OFF) is Policy.EXACT
    with pytest.raises(ValueError, match="'best-effort, exact' is no policy"):
        policy_of(CIMultiDict([(name, "best-effort"), (name, "exact")]), Policy.OFF)


async def test_an_unknown_policy_is_a_400_that_names_those_that_are_known() -> None:
    coordinator = two(Script())
    async with proxied(coordinator) as client:
        got = await client.post("/v1/completions", {"prompt": "x"}, X_Midstream_Policy="perfect")
    assert got.status == 400
    assert "'perfect'" in got.json["error"]["message"]
    assert "best-effort" in got.json["error"]["message"]
    assert coordinator.calls == []


async def test_off_passes_a_request_through() -> None:
    coordinator = two(Script())
    async with proxied(coordinator) as client:
        got = await client.post("/v1/completions", {"prompt": "x", "stream": True}, X_Midstream_Policy="off")
    assert got.text == ANSWER.text()
    assert coordinator.calls == []
    seen = coordinator.engines[0].seen[0]
    assert "kv_transfer_params" not in seen.body
    assert "X-Midstream-Policy" not in seen.headers


async def test_what_cannot_be_exact_is_refused_before_it_begins_where_exact_is_asked_for() -> None:
    coordinator = two(Script())
    async with proxied(coordinator, ProxySettings(policy=Policy.EXACT)) as client:
        got = await client.post("/v1/completions", {"prompt": "x", **OBSTACLE})
        allowed = await client.post("/v1/completions", {"prompt": "x", **OBSTACLE}, X_Midstream_Policy="best-effort")
    assert (got.status, got.json["error"]["code"]) == (422, "not_exact")
    assert "prompt_embeds" in got.json["error"]["message"]
    assert allowed.status == 200


async def test_what_cannot_be_exact_runs_without_a_marker_and_is_run_again_elsewhere() -> None:
    coordinator = two(Script(at=3))
    async with proxied(coordinator) as client:
        got = await client.post("/v1/completions", {"prompt": "x", **OBSTACLE})
    assert got.status == 200
    (_, facts) = coordinator.of("admit")[0]
    assert facts.exact_obstacle == "prompt_embeds"
    for engine in coordinator.engines:
        (seen,) = engine.seen
        assert "kv_transfer_params" not in seen.body
        assert "return_token_ids" not in seen.body
        assert "seed" not in seen.body


async def test_a_stream_that_cannot_be_exact_ends_with_an_error_once_something_was_sent() -> None:
    coordinator = two(Script(at=3))
    async with proxied(coordinator) as client:
        got = await client.complete(**OBSTACLE)
    assert coordinator.of("take_over") == []
    assert got.chunks[-1]["error"]["code"] == "worker_lost"
    assert "prompt_embeds" in got.chunks[-1]["error"]["message"]


async def test_a_stream_that_cannot_be_exact_is_run_again_if_nothing_was_sent() -> None:
    coordinator = two(Script(drops_request=True))
    async with proxied(coordinator) as client:
        got = await client.complete(**OBSTACLE)
    assert got.text == ANSWER.text()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_takeover_that_came_to_less_than_exact_ends_in_a_refusal_and_nothing_of_it_is_sent(
    stream: bool,
) -> None:
    coordinator = two(Script(at=3))
    coordinator.settled_refusal = Refused("not_exact", "its policy forbids that")
    async with proxied(coordinator) as client:
        got = await client.post(
            "/v1/completions",
            {"prompt": "x", "stream": stream},
            X_Midstream_Policy="exact",
            X_Midstream_Report="1",
        )
    error = got.chunks[-1]["error"] if stream else got.json["error"]
    assert (error["code"], error["message"]) == ("not_exact", "its policy forbids that")
    if stream:
        assert got.text == ANSWER.visible(3)
        assert b": midstream outcome=refused" in got.raw
    else:
        assert got.status == 422
    assert coordinator.of("ended") == [("ended", "failed")]


async def test_each_takeover_is_asked_about_once_and_an_undisturbed_stream_never() -> None:
    coordinator = two(Script(at=3, ahead=2))
    async with proxied(coordinator) as client:
        await client.complete()
        assert coordinator.of("settled") == [("settled", Policy.BEST_EFFORT)]
        coordinator.engines = coordinator.engines[1:]
        await client.complete()
    assert len(coordinator.of("settled")) == 1


@pytest.mark.parametrize(("kv", "outcome"), [(KvSource.HELD, "exact"), (KvSource.NONE, "recomputed")])
async def test_a_client_that_asked_is_told_session_and_outcome_in_headers(kv: KvSource, outcome: str) -> None:
    coordinator = two(Script(at=3))
    coordinator.kv = kv
    async with proxied(coordinator) as client:
        asked: dict[str, Any] = {"prompt": "x"}
        got = await client.post("/v1/completions", asked, X_Midstream_Report="1")
        plain = await client.post("/v1/completions", asked)
    (_, facts) = coordinator.of("admit")[0]
    assert got.headers["X-Midstream-Session"] == facts.session
    # With it the client can have the same answer again.
    assert int(got.headers["X-Midstream-Seed"]) == coordinator.engines[0].seen[0].body["seed"]
    assert (got.headers["X-Midstream-Outcome"], got.headers["X-Midstream-Takeovers"]) == (outcome, "1")
    assert not [name for name in plain.headers if name.startswith("X-Midstream")]


async def test_a_stream_names_its_session_to_a_client_that_asked() -> None:
    coordinator = two(Script(at=3, fate=Fate.ERRS))
    async with proxied(coordinator) as client:
        got = await client.post("/v1/completions", {"prompt": "x", "stream": True}, X_Midstream_Report="1")
    (_, facts) = coordinator.of("admit")[0]
    assert got.headers["X-Midstream-Session"] == facts.session
