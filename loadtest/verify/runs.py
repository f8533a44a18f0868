"""Runs one request: undisturbed, or interrupted in one of the ways, and says what became of it.

Owns the moment of an interruption. Invariant: what a run reports of its takeover is what the sidecar itself reports of
that very session; every wait is bounded. It judges nothing. `Control` is what it needs of the sidecar's operator
socket; the daemon's own client fits.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp

from ...session.errors import EngineError, Refused
from ...session.ids import SessionId, session_id
from ..aim import Shot, kill_at, target
from ..client import REPORT_HEADER, Answer, read_stream
from ..harness import SidecarProcess, Victim
from .cuts import Way
from .judge import Interruption, Reading
from .prompts import CHAT, Prompt

ANSWER_S = 600.0
# A planned move is asked for this many tokens before its cut, so that the sidecar waits for it and not the client.
LEAD_TOKENS = 6
# How long a session's report may be behind the last byte of its answer.
REPORT_S = 10.0
SNAPSHOT_TRIES = 20
LOG_LINES_MAX = 20
LOG_LINE_MAX = 500
SNAPSHOT_PAUSE_S = 0.01
_REPORT = {REPORT_HEADER: "1"}
# What the operator's socket says of a session that is over; all else that it refuses, it would refuse again.
_LATE = ("ended", "no_session", "busy", "no_snapshot", "session", "finished", "gone", "table")


_LEAST_EXACT_FIRST = ("refused", "restarted", "recomputed", "exact")
_ENDED = ("finished", "failed", "refused", "cancelled")


class Control(Protocol):
    """What is asked of the sidecar's operator socket. Both raise Refused with the sidecar's own words."""

    async def move(self, session: SessionId, *, tier: str | None = None, at: int | None = None) -> int:
        """Have a session go on elsewhere after `at` outputs; returns how many there were."""
        ...

    async def snapshot(self, session: SessionId) -> Mapping[str, Any]:
        """Store a session now."""
        ...


@dataclass(frozen=True, slots=True)
class Run:
    """One interrupted answer. `journal`: outputs when it was cut; `kept`: outputs with which it went on."""

    reading: Reading
    session: str
    outcome: str
    tier: str = ""
    journal: int = 0
    kept: int = 0
    lag: int = 0
    had: int = 0
    gap_ms: float = 0.0
    detail: str = ""
    killed: tuple[str, ...] = ()

    @property
    def interruption(self) -> Interruption:
        """For the judge."""
        return Interruption(self.outcome, self.had, self.kept)


class Runner:
    """Runs requests against one sidecar."""

    def __init__(
        self,
        sidecar: SidecarProcess,
        http: aiohttp.ClientSession,
        control: Control,
        model: str,
        *,
        isolate: bool = True,
    ) -> None:
        """`isolate`: each run brings a cache salt of its own, so that none finds a prefix in an engine's cache."""
        self.sidecar = sidecar
        self.http = http
        self.control = control
        self._model = model
        self._isolate = isolate

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """What is sent."""
        salt = {"cache_salt": uuid.uuid4().hex} if self._isolate else {}
        return {"model": self._model, **salt, **prompt.body}

    async def answer(self, prompt: Prompt, on_tokens: Callable[[Answer], Any] | None = None) -> Answer:
        """The answer as a hostile client reads it; one without an end is broken. EngineError if the sidecar is gone."""
        url = self.sidecar.url + prompt.path
        try:
            async with asyncio.timeout(ANSWER_S):
                answer = await read_stream(
                    self.http, url, self.body(prompt), headers=dict(_REPORT), on_tokens=on_tokens
                )
        except TimeoutError:
            answer = Answer(violations=[f"it had not ended after {ANSWER_S:g} s"])
        if answer.violations:
            self.sidecar.require_running()
        return answer

    async def undisturbed(self, prompt: Prompt) -> Reading:
        """A control."""
        return Reading.of(await self.answer(prompt))

    async def interrupted(self, prompt: Prompt, way: Way, at: int, *, lag: int, prompt_len: int) -> Run:
        """The answer, cut after `at` tokens."""
        match way:
            case Way.KILL:
                return await self._killed(prompt, at, prompt_len)
            case Way.MOVE:
                return await self.with_order(prompt, at - LEAD_TOKENS, lambda s: self._move(s, "held", at))
            case Way.DISK:

                async def order(session: SessionId) -> int:
                    await self.snapshot(session)
                    return await self._move(session, "disk", at)

                return await self.with_order(prompt, at - LEAD_TOKENS - lag, order)

    async def snapshot(self, session: SessionId) -> None:
        """Store a session now; a first token may be out a moment before the KV of its prompt counts."""
        for _ in range(SNAPSHOT_TRIES):
            try:
                await self.control.snapshot(session)
                return
            except Refused as error:
                if error.reason != "no_snapshot":
                    raise
            await asyncio.sleep(SNAPSHOT_PAUSE_S)
        raise Refused("no_snapshot", f"session {session}: nothing of it could be stored")

    async def with_order(self, prompt: Prompt, when: int, order: Callable[[SessionId], Awaitable[int]]) -> Run:
        """The answer, of which `order` is called (beside it) as soon as the client has `when` tokens, or the first."""
        trigger = _Trigger(max(when, 1), order)
        try:
            answer = await self.answer(prompt, trigger.look)
            journal, refusal = await trigger.result()
        finally:
            await trigger.close()
        run = await self._run(answer, journal, had=trigger.had, detail=str(refusal or ""))
        if refusal is not None and refusal.reason not in _LATE and not run.outcome:
            return replace(run, outcome="refused")
        return run

    async def top_logprobs(self, prompt: Prompt, index: int) -> list[tuple[str, float]]:
        """What an undisturbed run would choose from at output `index`, likeliest first; [] where it does not say."""
        asked = {"logprobs": True, "top_logprobs": 5} if prompt.path == CHAT else {"logprobs": 5}
        body = {**self.body(prompt), **asked, "stream": False}
        url = self.sidecar.url + prompt.path
        with suppress(aiohttp.ClientError, TimeoutError, KeyError, IndexError, TypeError, ValueError):
            async with asyncio.timeout(ANSWER_S), self.http.post(url, json=body) as response:
                told = (await response.json())["choices"][0]["logprobs"]
            if prompt.path == CHAT:
                return [(str(e["token"]), float(e["logprob"])) for e in told["content"][index]["top_logprobs"]]
            found = told["top_logprobs"][index]
            return sorted(((str(t), float(p)) for t, p in found.items()), key=lambda pair: -pair[1])
        return []

    def log_of(self, session: str) -> tuple[str, ...]:
        """What the sidecar's log says of a session; the last lines of it."""
        if not session:
            return ()
        lines = self.sidecar.log.read_text(errors="replace").splitlines()
        return tuple(line[:LOG_LINE_MAX] for line in lines if session in line)[-LOG_LINES_MAX:]

    async def _move(self, session: SessionId, tier: str, at: int) -> int:
        return await self.control.move(session, tier=tier, at=at)

    async def _killed(self, prompt: Prompt, at: int, prompt_len: int) -> Run:
        targets = [target(w, self.sidecar.state_dir) for w in await self.sidecar.workers(self.http)]
        known = {s["session"] for s in await self.sidecar.sessions(self.http)}
        shooting = asyncio.to_thread(kill_at, targets, known, prompt_len=prompt_len, outputs=at, victim=Victim.TREE)
        shot: Shot
        shot, answer = await asyncio.gather(shooting, self.answer(prompt))
        run = await self._run(answer, shot.outputs, had=0, killed=shot.killed)
        epoch = next(t.epoch for t in targets if t.name == shot.worker)
        await self.sidecar.wait_back(self.http, shot.worker, epoch)
        return run

    async def _run(
        self, answer: Answer, journal: int, *, had: int, detail: str = "", killed: tuple[str, ...] = ()
    ) -> Run:
        told = await self._told(answer.session)
        # A client that had nothing yet sees no gap between tokens: then the sidecar's figure is the longer one.
        gap_ms = max(round(answer.gap_s * 1000, 1), float(told.get("gap_ms") or 0))
        outcome = str(told.get("outcome") or "")
        if not outcome and "outcome=refused" in answer.report:
            outcome = "refused"
        cut, lag = int(told.get("cut") or 0), int(told.get("lag") or 0)
        return Run(
            Reading.of(answer),
            answer.session,
            outcome,
            tier=str(told.get("tier") or ""),
            journal=journal or cut + lag,
            kept=cut + lag,
            lag=lag,
            had=had,
            gap_ms=gap_ms,
            detail=str(told.get("detail") or "") or detail,
            killed=killed,
        )

    async def _told(self, session: str) -> Mapping[str, Any]:
        """What the sidecar says of a session's takeovers; {} where there were none."""
        deadline_s = time.monotonic() + REPORT_S
        while session and time.monotonic() < deadline_s:
            found = [s for s in await self.sidecar.sessions(self.http) if s["session"] == session]
            if found and found[-1]["state"] in _ENDED:
                return least_exact(found[-1]["outcomes"], ended_well=found[-1]["state"] == "finished")
            await asyncio.sleep(0.02)
        return {}


def least_exact(outcomes: Sequence[Mapping[str, Any]], *, ended_well: bool) -> Mapping[str, Any]:
    """Of a session's takeovers, the one that decides what its answer is worth.

    Those that came to nothing were followed by another, or by the end: then they decide only where it was a bad one.
    """
    ranked = [o for o in outcomes if o["outcome"] in _LEAST_EXACT_FIRST]
    if outcomes and not ended_well:
        return {**outcomes[-1], "outcome": "refused"}
    return min(ranked, key=lambda o: _LEAST_EXACT_FIRST.index(o["outcome"]), default={})


class _Trigger:
    """Gives one order for a session when its client has so many tokens."""

    def __init__(self, when: int, order: Callable[[SessionId], Awaitable[int]]) -> None:
        self._when = when
        self._order = order
        self._task: asyncio.Task[int] | None = None
        self.had = 0

    def look(self, answer: Answer) -> None:
        """After each chunk that brought tokens."""
        if self._task is not None or len(answer.token_ids) < self._when:
            return
        if not answer.session:
            raise EngineError("the sidecar does not tell the session's name; run verify with a sidecar of its version")
        self.had = len(answer.token_ids)
        self._task = asyncio.ensure_future(self._order(session_id(answer.session)))

    async def result(self) -> tuple[int, Refused | None]:
        """When the answer is over: what the order came to, or 0 and why it was not carried out."""
        if self._task is None:
            return 0, Refused("ended", f"the answer had fewer than {self._when} tokens")
        try:
            async with asyncio.timeout(REPORT_S):
                return await self._task, None
        except Refused as error:
            return 0, error
        except TimeoutError:
            return 0, Refused("ended", f"the sidecar had not answered {REPORT_S:g} s after the answer's end")

    async def close(self) -> None:
        """Nothing is left running, nor unheard, where the answer itself came to nothing."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
