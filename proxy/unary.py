"""Handles an unstreamed session: the client waits for one answer, however many workers it takes.

Invariant: silence is never taken for a death here; the answer that is passed on is one engine's own, whole, and begins
with what was journaled. The client has nothing before that, so nothing has to be spliced.
"""

import asyncio
from dataclasses import dataclass

import aiohttp
import msgspec
from aiohttp import web

from ..session.errors import EngineError, Refused
from . import headers, problems
from .coordinator import Placement, Reason
from .dialects.hiding import hide_ids
from .dialects.openai import INTERRUPTED_FINISHES
from .fleet import why_not_begun
from .generation import Generation
from .report import Report
from .upstream import UpstreamLost, read_all, unless_interrupted


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


_decoder = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class _Lost:
    """An attempt that came to nothing."""

    reason: Reason
    text: str


class UnaryHandler:
    """One unstreamed session, from its first placement to its answer."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._failover = generation.failover

    async def run(self, placement: Placement) -> web.StreamResponse:
        """Answer the client."""
        ending = "failed"
        try:
            while True:
                got = await self._attempt(placement)
                if isinstance(got, web.Response):
                    if self._failover.pending:
                        await self._failover.settled(placement)
                    ending = "finished" if got.status < 500 else "failed"
                    self._failover.resumed(placement)
                    self._tell(got)
                    return got
                placement = await self._failover.take_over(placement, got.reason, got.text, ())
                self._generation.kept.until(placement.fetched)
        except asyncio.CancelledError:
            ending = "cancelled"
            raise
        except Refused as error:
            return problems.refused(error).response(self._generation.request.headers, self._generation.request.path)
        finally:
            self._generation.kept.let_go()
            self._failover.ended(ending)

    def _tell(self, answer: web.Response) -> None:
        """Say in the headers what happened, to a client that asked."""
        self._generation.tell_session(answer.headers)
        if self._generation.wants_report:
            answer.headers.update(self._failover.report().headers())

    async def _attempt(self, placement: Placement) -> web.Response | _Lost:
        try:
            answer = await self._generation.send(placement)
        except UpstreamLost as lost:
            return _Lost(lost.reason, str(lost))
        moved = False
        try:
            body = await unless_interrupted(
                read_all(answer, self._generation.settings.answer_bytes_max),
                placement.interrupted,
                self._generation.kept,
            )
            return await self._judge(answer, body, placement)
        except UpstreamLost as lost:
            moved = lost.reason is Reason.MOVE
            return _Lost(lost.reason, str(lost))
        except EngineError as error:
            return _Lost(Reason.ENGINE_ERROR, str(error))
        finally:
            if moved:
                self._generation.kept.hold(answer)
            else:
                answer.close()

    async def _judge(self, answer: aiohttp.ClientResponse, body: bytes, placement: Placement) -> web.Response | _Lost:
        reason = why_not_begun(answer.status, answer.headers) if placement.is_node else None
        if reason is not None:
            return _Lost(reason, f"node {placement.worker} answered {answer.status}: {body[:300]!r}")
        if answer.status >= 500:
            # A dying engine answers so, shortly before its process is gone.
            await asyncio.wait({placement.interrupted}, timeout=self._generation.settings.error_grace_s)
            if placement.interrupted.done():
                return _Lost(placement.interrupted.result(), f"the worker answered {answer.status}")
            if self._failover.pending:
                return _Lost(Reason.ENGINE_ERROR, f"the worker answered {answer.status}")
        elif answer.status == 200 and (lost := self._what_is_wrong(body, placement)) is not None:
            return lost
        report = Report.of_headers(answer.headers) if placement.is_node else None
        if report is not None:
            self._failover.reported_by_node(placement, report)
        hiding = self._generation.wishes.hiding
        shown = body if hiding is None else hide_ids(body, hiding)
        kept = headers.of_answer(answer.headers, self._generation.request.headers)
        kept.popall("Content-Length", None)
        return web.Response(status=answer.status, body=shown, headers=kept)

    def _what_is_wrong(self, body: bytes, placement: Placement) -> _Lost | None:
        """Whether an answer is an interruption in disguise, or not the one that was journaled."""
        events = self._generation.wishes.events
        if events is not None:
            # Of these APIs' answers only their engine knows the tokens.
            if events.gave_up(body) or (events.hides_aborts and self._failover.gave_up(placement)):
                return _Lost(Reason.ABORT, "the engine gave the request up")
            return None
        try:
            choices = _decoder.decode(body).choices
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None  # not this dialect: the engine's own business
        if any(choice.finish_reason in INTERRUPTED_FINISHES for choice in choices):
            return _Lost(Reason.ABORT, "the engine ended the request with an abort")
        expected = placement.expected
        if not expected or len(choices) != 1 or choices[0].token_ids is None:
            return None
        ids = choices[0].token_ids
        # A stop string may end the answer a few tokens before the journal does; what is there must agree.
        short = len(ids) < len(expected) and not self._generation.wishes.stop_strings
        if short or any(a != b for a, b in zip(ids, expected, strict=False)):
            return _Lost(Reason.MISMATCH, "the worker's answer does not begin with the journaled tokens")
        return None
