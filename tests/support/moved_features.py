"""Cases of what requests can ask for, each run twice on a real engine: left alone, and moved in its midst.

Owns what a case is, the running of a table of them, several at once, and the verdict: nobody can tell both answers
apart by any field, and the moves came to what the case says. Knows no engine.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from midstream.loadtest.harness import SidecarProcess
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support.told import Told, differences, tell
from support.vllm_rig import ASK_REPORT, before_its_end

AT_ONCE = 8
WAIT_S = 60.0
SESSION = "X-Midstream-Session"
# What the sidecar assigns to a request without a seed is another one each time, and so is what it says.
UNREPEATABLE = "unseeded"


@dataclass(frozen=True, slots=True)
class Feature:
    """One case. `alone`: it must have the engines to itself, so that fractions are equal, too.

    `outcome` is what its moves come to. `tier` is where the KV comes from; where that is the disk, a snapshot is stored
    a few tokens before the first cut.
    """

    name: str
    path: str
    body: Mapping[str, Any]
    cuts: tuple[int, ...]
    alone: bool = False
    tier: str = "held"
    outcome: str = "exact"

    @property
    def stream(self) -> bool:
        """Whether its answer is streamed."""
        return bool(self.body["stream"])


@dataclass(frozen=True, slots=True)
class Ran:
    """Both answers to one case, and what the sidecar says of the moved one."""

    plain: Told
    moved: Told
    outcomes: list[dict[str, Any]]


Results = Mapping[str, Ran | BaseException]


async def run_all(sidecar: SidecarProcess, features: Sequence[Feature]) -> Results:
    """All cases, those that need the engines to themselves one by one; what went wrong in one is its own result."""
    free = asyncio.Semaphore(AT_ONCE)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(240)) as http,
        ControlClient(sidecar.state_dir) as control,
    ):

        async def one(feature: Feature) -> Ran:
            async with free:
                plain = await tell(http, sidecar.url + feature.path, feature.body, **ASK_REPORT)
                moved, outcomes = await before_its_end(partial(_moved, sidecar, http, control, feature))
                return Ran(plain, moved, outcomes)

        crowd = [f for f in features if not f.alone]
        done = dict(
            zip([f.name for f in crowd], await asyncio.gather(*map(one, crowd), return_exceptions=True), strict=True)
        )
        for feature in features:
            if feature.alone:
                [done[feature.name]] = await asyncio.gather(one(feature), return_exceptions=True)
        return done


async def _moved(
    sidecar: SidecarProcess, http: aiohttp.ClientSession, control: ControlClient, feature: Feature
) -> tuple[Told, list[dict[str, Any]]]:
    """The answer of a session that is moved at each cut, and what its moves came to. Raises Refused."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    known = {s["session"] for s in await sidecar.sessions(http)}

    def note(headers: Any) -> None:
        if not begun.done():
            begun.set_result(headers.get(SESSION, ""))

    telling = asyncio.create_task(tell(http, sidecar.url + feature.path, feature.body, on_headers=note, **ASK_REPORT))
    try:
        # The head of an unstreamed answer comes with the answer: its session is the one that was not there before.
        session = await begun if feature.stream else await _newest(sidecar, http, known)
        for cut in feature.cuts:
            if feature.tier == "disk":
                await _stored(control, session, before=cut)
            await _move(control, session, feature.tier, cut)
    except BaseException:
        telling.cancel()
        raise
    told = await telling
    outcomes = await _outcomes(sidecar, http, told.headers[SESSION])
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


async def _newest(sidecar: SidecarProcess, http: aiohttp.ClientSession, known: set[str]) -> str:
    deadline_s = time.monotonic() + WAIT_S
    while True:
        for session in await sidecar.sessions(http):
            if session["session"] not in known:
                return str(session["session"])
        assert time.monotonic() < deadline_s, "the request did not become a session"
        await asyncio.sleep(0.02)


async def _outcomes(sidecar: SidecarProcess, http: aiohttp.ClientSession, session: str) -> list[dict[str, Any]]:
    return next(s["outcomes"] for s in await sidecar.sessions(http) if s["session"] == session)


def of(ran: Results, name: str) -> Ran:
    """A case that ran."""
    found = ran[name]
    if isinstance(found, BaseException):
        raise AssertionError(f"{name}: {found!r}") from found
    return found


def require_same(ran: Results, feature: Feature) -> None:
    """Nobody can tell a moved answer from an undisturbed one."""
    case = of(ran, feature.name)
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
    told = [(o["reason"], o["outcome"]) for o in came_to]
    assert told == [("move", feature.outcome)] * len(feature.cuts), case.outcomes
    if feature.outcome == "exact":
        # Nothing but the newest token's KV was computed again.
        for one in came_to:
            ended = one["tier"] == "journal" and one["tokens_recomputed"] == 0
            # Where the old owner ended within the move there may be only a snapshot left.
            tiers = {feature.tier, "disk"} if len(came_to) < len(case.outcomes) else {feature.tier}
            assert ended or (one["tier"] in tiers and one["tokens_recomputed"] == 1), case.outcomes
    if feature.tier == "disk":
        assert case.outcomes[0]["lag"] > 0, case.outcomes
    if feature.stream:
        assert case.moved.report.startswith(f"midstream outcome={feature.outcome} takeovers=")
    else:
        told = case.moved.headers["X-Midstream-Outcome"], case.moved.headers["X-Midstream-Takeovers"]
        assert told == (feature.outcome, str(len(feature.cuts)))


def _within(feature: Feature) -> float:
    """How far apart fractions may be: alone on an engine, and with nothing prefilled again, not at all."""
    return 1e-6 if feature.alone and feature.outcome == "exact" else 1e-3
