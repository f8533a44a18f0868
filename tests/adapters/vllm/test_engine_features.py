"""Two real vLLM workers, everything that a request can ask for, and a session that is moved in the midst of it.

A move takes the KV out of the live pool of the one engine into the other's, which costs no start of an engine; what
kills do is in the other files. A client must not be able to tell a moved answer from an undisturbed one by any field.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import pytest

from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support.told import Told, differences, tell
from support.vllm_features import FEATURES, Feature
from support.vllm_models import with_thinking_tokens
from support.vllm_rig import ASK_REPORT, COMPACT, Rig, before_its_end, shallow_model

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(900)]

AT_ONCE = 8
WAIT_S = 60.0
OPTIONS = (
    "--max-num-batched-tokens", "256", "--scheduling-policy", "priority", "--reasoning-parser", "qwen3",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *COMPACT,
)  # fmt: skip
SESSION = "X-Midstream-Session"
# What the sidecar assigns to a request without a seed is another one each time, and so is what it says.
UNREPEATABLE = "unseeded"


@dataclass(frozen=True, slots=True)
class Ran:
    """Both answers to one case, and what the sidecar says of the moved one."""

    plain: Told
    moved: Told
    outcomes: list[dict[str, Any]]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Two workers of a model that can think and call tools."""
    model = with_thinking_tokens(shallow_model(), tmp_path_factory.mktemp("model") / "thinking")
    # Many cases share two cores: how long a copy takes is not what is tested here.
    rig = Rig(*OPTIONS, workers=2, settings={"restore.load_timeout_s": 60}, model=model)
    rig.sidecar.store = tmp_path_factory.mktemp("store")
    try:
        rig.start()
        yield rig
    finally:
        rig.stop()


@pytest.fixture(scope="module")
def ran(rig: Rig) -> dict[str, Ran | BaseException]:
    """All cases, several at once; what went wrong in one is told by its own test."""
    return asyncio.run(_run(rig))


async def _run(rig: Rig) -> dict[str, Ran | BaseException]:
    free = asyncio.Semaphore(AT_ONCE)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(240)) as http,
        ControlClient(rig.sidecar.state_dir) as control,
    ):

        async def one(feature: Feature) -> Ran:
            async with free:
                plain = await tell(http, rig.sidecar.url + feature.path, feature.body, **ASK_REPORT)
                moved, outcomes = await before_its_end(partial(_moved, rig, http, control, feature))
                return Ran(plain, moved, outcomes)

        crowd = [f for f in FEATURES if not f.alone]
        done = dict(
            zip([f.name for f in crowd], await asyncio.gather(*map(one, crowd), return_exceptions=True), strict=True)
        )
        for feature in FEATURES:
            if feature.alone:
                [done[feature.name]] = await asyncio.gather(one(feature), return_exceptions=True)
        return done


async def _moved(
    rig: Rig, http: aiohttp.ClientSession, control: ControlClient, feature: Feature
) -> tuple[Told, list[dict[str, Any]]]:
    """The answer of a session that is moved at each cut, and what its moves came to. Raises Refused."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    known = {s["session"] for s in await rig.sidecar.sessions(http)}

    def note(headers: Any) -> None:
        if not begun.done():
            begun.set_result(headers.get(SESSION, ""))

    telling = asyncio.create_task(
        tell(http, rig.sidecar.url + feature.path, feature.body, on_headers=note, **ASK_REPORT)
    )
    try:
        # The head of an unstreamed answer comes with the answer: its session is the one that was not there before.
        session = await begun if feature.stream else await _newest(rig, http, known)
        for cut in feature.cuts:
            if feature.tier == "disk":
                await _stored(control, session, before=cut)
            await _move(control, session, feature.tier, cut)
    except BaseException:
        telling.cancel()
        raise
    told = await telling
    outcomes = await _outcomes(rig, http, told.headers[SESSION])
    if all(o["outcome"] == "interrupted" for o in outcomes):
        raise Refused("ended", f"{feature.name}: the end of the answer overtook its move: {outcomes}")
    return told, outcomes


async def _move(control: ControlClient, session: str, tier: str, cut: int) -> None:
    """Move a session as soon as it has so many outputs and is where the last move brought it."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        try:
            await control.move(SessionId(session), tier=tier, at=cut)
            return
        except Refused as refused:
            if refused.reason != "busy" or time.monotonic() > deadline_s:
                raise
            await asyncio.sleep(0.02)


async def _stored(control: ControlClient, session: str, *, before: int) -> None:
    """Store a snapshot of what a session has so far; what follows until the cut is to be regenerated."""
    deadline_s = time.monotonic() + WAIT_S
    outputs = 0
    while outputs < 3:
        with suppress(Refused):
            outputs = int((await control.snapshot(SessionId(session)))["outputs"])
        assert time.monotonic() < deadline_s, "no snapshot was stored"
        await asyncio.sleep(0.05)
    assert outputs < before, "the snapshot came too late to have anything to regenerate"


async def _newest(rig: Rig, http: aiohttp.ClientSession, known: set[str]) -> str:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        for session in await rig.sidecar.sessions(http):
            if session["session"] not in known:
                return str(session["session"])
        assert time.monotonic() < deadline_s, "the request did not become a session"
        await asyncio.sleep(0.02)


async def _outcomes(rig: Rig, http: aiohttp.ClientSession, session: str) -> list[dict[str, Any]]:
    return next(s["outcomes"] for s in await rig.sidecar.sessions(http) if s["session"] == session)


def _of(ran: dict[str, Ran | BaseException], name: str) -> Ran:
    found = ran[name]
    if isinstance(found, BaseException):
        raise AssertionError(f"{name}: {found!r}") from found
    return found


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.name)
def test_nobody_can_tell_a_moved_answer_from_an_undisturbed_one(
    ran: dict[str, Ran | BaseException], feature: Feature
) -> None:
    case = _of(ran, feature.name)
    assert (case.plain.status, case.plain.done, case.plain.error) == (200, True, None), case.plain
    if case.plain.usage is not None:
        assert case.plain.usage["completion_tokens"] > feature.cuts[-1], "it was not long enough to be moved"
    assert (case.moved.status, case.moved.done, case.moved.error) == (200, True, None), case.moved
    if feature.name == UNREPEATABLE:
        assert case.moved.usage == case.plain.usage
        assert case.moved.fields == case.plain.fields
    else:
        assert differences(case.plain, case.moved, within=_within(feature)) == []
    # One whose old owner has written the whole answer before its KV was copied is taken up again, for its ending.
    came_to = [o for o in case.outcomes if o["outcome"] != "interrupted"]
    if came_to[-1]["tier"] == "journal":
        # The one before found no KV any more, and what it began to compute was never sent.
        came_to = came_to[-len(feature.cuts) :]
    assert [(o["reason"], o["outcome"]) for o in came_to] == [("move", feature.outcome)] * len(feature.cuts)
    if feature.outcome == "exact":
        # Nothing but the newest token's KV was computed again.
        for one in came_to:
            ended = one["tier"] == "journal" and one["tokens_recomputed"] == 0
            assert ended or (one["tier"], one["tokens_recomputed"]) == (feature.tier, 1), case.outcomes
    if feature.tier == "disk":
        assert case.outcomes[0]["lag"] > 0, case.outcomes
    if feature.stream:
        assert case.moved.report.startswith(f"midstream outcome={feature.outcome} takeovers=")
    else:
        told = case.moved.headers["X-Midstream-Outcome"], case.moved.headers["X-Midstream-Takeovers"]
        assert told == (feature.outcome, str(len(feature.cuts)))


def test_the_cases_are_what_their_names_say(ran: dict[str, Ran | BaseException]) -> None:
    """A case in which nothing of what it is about ever happened would pass for nothing."""
    for feature in FEATURES:
        plain = _of(ran, feature.name).plain
        if "JSON schema" in feature.name:
            assert set(json.loads(plain.text(".content"))) == {"name", "age", "tags"}, plain.values
        if "reasoning" in feature.name or "thinking" in feature.name:
            assert plain.text(".reasoning"), plain.values
        if "thinking" in feature.name:
            assert plain.text(".content"), plain.values
        if feature.name in ("tool call, named", "tool call, required", "unstreamed tool call"):
            assert "get_weather" in json.dumps(plain.values) or "get_time" in json.dumps(plain.values)
        if feature.name == "tool calls, two":
            names = [v for k, v in plain.values.items() if k.endswith(".function.name")]
            assert names == ["get_weather", "get_time"], plain.values


def _within(feature: Feature) -> float:
    """How far apart fractions may be: alone on an engine, and with nothing prefilled again, not at all."""
    return 1e-6 if feature.alone and feature.outcome == "exact" else 1e-3
