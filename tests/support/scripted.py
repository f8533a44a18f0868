"""A scripted engine on a real loopback socket, and a scripted coordinator that knows several of them.

The engine speaks vLLM's completions and chat completions (support/answers.py), journals a token before it sends it,
honours the marker's resume record with a replay, and fails where its script says. It keeps what it was sent, for
tests to look at.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from midstream.proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from midstream.session.errors import Refused
from midstream.session.marker import KvSource, Marker, Resume

from .answers import DONE, Answer, Voice


class Fate(StrEnum):
    """What happens to an engine at the token that its script names."""

    DIES = "dies"
    STALLS = "stalls"
    ABORTS = "aborts"
    ERRS = "errs"
    ENDS = "ends"


@dataclass(frozen=True, slots=True)
class Script:
    """What an engine does with one request."""

    at: int | None = None
    fate: Fate = Fate.DIES
    # Tokens that were journaled before the death, but never sent.
    ahead: int = 0
    gap_s: float = 0.0
    # How a resumed stream begins: all of the resume record in one chunk, or in chunks of this many tokens.
    replay_by: int | None = None
    finishes_apart: bool = False
    head_only: bool = False
    status: int = 200
    body: bytes = b""
    drops_request: bool = False


@dataclass(slots=True)
class Seen:
    """One request as an engine got it."""

    headers: CIMultiDict[str]
    body: dict[str, Any]
    raw: bytes
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    written_bytes: int = 0


class ScriptedEngine:
    """One worker. `scripts` are used up one a request; the last one stays."""

    def __init__(self, answer: Answer, *scripts: Script, name: str = "w") -> None:
        self.answer = answer
        self.name = name
        self.scripts = list(scripts) or [Script()]
        self.seen: list[Seen] = []
        self.journals: dict[str, list[int]] = {}
        # Sessions whose end it noted as none.
        self.given_up: set[str] = set()
        self.meets_fate = asyncio.Event()
        self.url = ""

    @asynccontextmanager
    async def serving(self, **runner: Any) -> AsyncIterator["ScriptedEngine"]:
        """Serve on a free port of the loopback interface."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_route("*", "/{path:.*}", self._echo)
        app_runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, **runner)
        await app_runner.setup()
        site = web.TCPSite(app_runner, "127.0.0.1", 0)
        await site.start()
        host, port = app_runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await app_runner.cleanup()

    async def _echo(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.seen.append(Seen(CIMultiDict(request.headers), {}, raw))
        headers = {"X-Engine": self.name, "X-Path": request.raw_path}
        return web.Response(body=raw, headers=headers, content_type="application/octet-stream")

    async def _begin(self, request: web.Request) -> tuple[Script, Seen, web.Response | None]:
        """Take a request in, under the next script; with an answer if that one refuses it."""
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        raw = await request.read()
        seen = Seen(CIMultiDict(request.headers), json.loads(raw), raw)
        self.seen.append(seen)
        if script.drops_request:
            _kill(request)
        if script.status == 200:
            return script, seen, None
        return script, seen, web.Response(status=script.status, body=script.body, content_type="application/json")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        script, seen, refusal = await self._begin(request)
        if refusal is not None:
            return refusal
        body = seen.body
        voice = self._voice(request, body)
        marker = (body.get("kv_transfer_params") or {}).get("midstream") or {}
        try:
            if body.get("stream"):
                return await self._stream(request, seen, voice, script, marker)
            return await self._whole(request, voice, script, marker)
        except asyncio.CancelledError:
            seen.cancelled.set()
            raise

    def _voice(self, request: web.Request, body: dict[str, Any]) -> Voice:
        stop = body.get("stop") or ()
        chat = request.path.endswith("chat/completions")
        return Voice(
            self.answer,
            chat=chat,
            wants_ids=bool(body.get("return_token_ids")),
            wants_usage=bool((body.get("stream_options") or {}).get("include_usage")),
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            id=f"{'chatcmpl' if chat else 'cmpl'}-{self.name}-{len(self.seen)}",
            created=1700000000 + 1000 * ord(self.name[-1]) + len(self.seen),
            model="tiny",
        )

    async def _stream(
        self, request: web.Request, seen: Seen, voice: Voice, script: Script, marker: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        journal = self.journals.setdefault(marker.get("session", ""), [])
        outputs = (marker.get("resume") or {}).get("outputs") or []
        journal[:] = outputs

        async def write(data: bytes) -> None:
            await response.write(data)
            seen.written_bytes += len(data)

        if voice.chat:
            await write(voice.role())
        count = voice.answer.length(voice.stops)
        finish = "stop" if count < len(voice.answer.pieces) else voice.answer.finish
        position, by = 0, script.replay_by or len(outputs)
        while position < len(outputs):
            end = min(position + by, len(outputs))
            ends = end == count and not script.finishes_apart
            await write(voice.tokens(position, end, first=position == 0, finish=finish if ends else None))
            position = end
        while position < count:
            if position == script.at:
                return await self._meet_fate(request, response, voice, script, journal)
            journal.append(voice.answer.ids[position])
            ends = position + 1 == count and not script.finishes_apart
            await write(voice.tokens(position, position + 1, first=position == 0, finish=finish if ends else None))
            position += 1
            await asyncio.sleep(script.gap_s)
        if script.at is not None and script.at >= count:
            return await self._meet_fate(request, response, voice, script, journal)
        if script.finishes_apart:
            await write(voice.tokens(count, count, first=False, finish=finish))
        if voice.wants_usage:
            await write(voice.usage(count))
        await write(DONE)
        await response.write_eof()
        return response

    async def _meet_fate(
        self,
        request: web.Request,
        response: web.StreamResponse,
        voice: Voice,
        script: Script,
        journal: list[int],
    ) -> web.StreamResponse:
        journal.extend(voice.answer.ids[len(journal) : len(journal) + script.ahead])
        self.meets_fate.set()
        match script.fate:
            case Fate.STALLS:
                await asyncio.sleep(3600)
            case Fate.ABORTS:
                await response.write(voice.tokens(len(journal), len(journal), first=False, finish="abort"))
                await response.write(DONE)
            case Fate.ERRS:
                error = {"message": "EngineCore died", "type": "InternalServerError", "code": 500}
                await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
                await response.write(DONE)
            case Fate.DIES:
                # What was sent reaches the client before the death does.
                await asyncio.sleep(0.02)
                _kill(request)
            case Fate.ENDS:
                pass
        await response.write_eof()
        return response

    async def _whole(
        self, request: web.Request, voice: Voice, script: Script, marker: dict[str, Any]
    ) -> web.StreamResponse:
        count = voice.answer.length(voice.stops)
        outputs = (marker.get("resume") or {}).get("outputs") or []
        journal = self.journals.setdefault(marker.get("session", ""), [])
        journal[:] = outputs
        await asyncio.sleep(script.gap_s)
        if script.at is not None:
            journal[:] = voice.answer.ids[: script.at + script.ahead]
            if script.fate is Fate.ABORTS:
                return web.Response(body=voice.whole(script.at, "abort"), content_type="application/json")
            if script.head_only:
                response = web.StreamResponse(headers={"Content-Length": "100"})
                await response.prepare(request)
                await response.write(b'{"id":')
            _kill(request)
        finish = "stop" if count < len(voice.answer.pieces) else voice.answer.finish
        return web.Response(body=voice.whole(count, finish), content_type="application/json")


def _kill(request: web.Request) -> None:
    """End a connection as a killed process does."""
    if request.transport is not None:
        request.transport.abort()
    raise asyncio.CancelledError


class ScriptedCoordinator:
    """Sends a session from one engine to the next; knows their journals as the real one does."""

    def __init__(self, *engines: ScriptedEngine) -> None:
        self.engines = engines
        self.calls: list[tuple[Any, ...]] = []
        self._outcome: Outcome | None = None
        self.placements: list[Placement] = []
        self.takeover_wait_s = 0.0
        self.refusal: Refused | None = None
        self.takeover_refusal: Refused | None = None
        self.settled_refusal: Refused | None = None
        # Of a planned move: what the old worker is kept for.
        self.fetched: asyncio.Future[None] | None = None
        # How many tokens of the journal the restored KV covers; None: all.
        self.cut: int | None = None
        self.finish: str | None = None
        self.lie: tuple[int, ...] | None = None
        self.kv = KvSource.HELD
        self._next: dict[str, int] = {}

    def of(self, name: str) -> list[tuple[Any, ...]]:
        """The calls of one kind."""
        return [call for call in self.calls if call[0] == name]

    async def admit(self, facts: SessionFacts) -> Placement:
        """The first engine."""
        self.calls.append(("admit", facts))
        if self.refusal is not None:
            raise self.refusal
        self._next[facts.session] = 0
        return self._place(facts, Marker(facts.session, 1), ())

    async def take_over(
        self,
        facts: SessionFacts,
        last: Placement,
        reason: Reason,
        delivered: Sequence[int],
        *,
        unseen: bool = False,
    ) -> Placement:
        """The next engine, with what the last one journaled."""
        self.calls.append(("take_over", reason, tuple(delivered)))
        await asyncio.sleep(self.takeover_wait_s)
        if self.takeover_refusal is not None:
            raise self.takeover_refusal
        journal = tuple(self._engine(facts).journals.get(facts.session, ()))
        if reason is Reason.MISMATCH:
            # What a wrong worker journaled is worth nothing.
            journal = last.expected
        if len(journal) < len(delivered):
            journal = tuple(delivered)
        self._next[facts.session] += 1
        outputs = journal if self.cut is None else journal[: self.cut]
        if self.finish is not None and outputs == journal:
            outputs = journal[:-1]
        generation = last.marker.generation + 1
        resume = Resume(outputs, self.kv, "0" * 32) if outputs else None
        expected = self.lie if self.lie is not None else journal
        return self._place(facts, Marker(facts.session, generation, resume), expected)

    async def settled(self, facts: SessionFacts, placement: Placement) -> None:
        """Note it, and refuse what is to be refused then."""
        self.calls.append(("settled", facts.policy))
        if self.settled_refusal is not None:
            raise self.settled_refusal

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """Note it."""
        self.calls.append(("resumed", gap_s))
        resume = placement.marker.resume
        if resume is None:
            self._outcome = Outcome.RESTARTED if not placement.expected else Outcome.RECOMPUTED
        else:
            self._outcome = Outcome.RECOMPUTED if resume.kv is KvSource.NONE else Outcome.EXACT

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """As many as the engine says."""
        return len(self._engine(facts).journals.get(facts.session, ()))

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """Whether the engine noted that it did not finish the request."""
        return facts.session in self._engine(facts).given_up

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """Of the last takeover."""
        return self._outcome

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """Note it."""
        self.calls.append(("mismatched", text))

    def ended(self, facts: SessionFacts, ending: str, tokens: int | None = None) -> None:
        """Note it."""
        self.calls.append(("ended", ending))

    def plain_upstream(self) -> str:
        """The first engine."""
        if self.refusal is not None:
            raise self.refusal
        return self.engines[0].url

    def interrupt(self, reason: Reason) -> None:
        """Tell the proxy that the newest placement's worker is gone."""
        with suppress(asyncio.InvalidStateError):
            self.placements[-1].interrupted.set_result(reason)

    def _engine(self, facts: SessionFacts) -> ScriptedEngine:
        return self.engines[min(self._next[facts.session], len(self.engines) - 1)]

    def _place(self, facts: SessionFacts, marker: Marker, expected: tuple[int, ...]) -> Placement:
        engine = self._engine(facts)
        placement = Placement(
            worker=engine.name,
            base_url=engine.url,
            marker=marker,
            interrupted=asyncio.get_running_loop().create_future(),
            expected=expected,
            finish=self.finish if expected else None,
            fetched=self.fetched,
        )
        self.placements.append(placement)
        return placement
