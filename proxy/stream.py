"""Handles a streamed session: reads workers' streams one after another, writes the client's one.

Owns the client's response. Invariant: the engine is read no faster than the client takes, all events of one read
leave in one write, and the stream ends in one of three ways: the engine's own ending, one in-band error, or the
client's leaving. What to send is `splice`'s to decide, where to go on the coordinator's.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from ..session.errors import EngineError, Refused
from . import headers, problems
from .coordinator import Outcome, Placement, Reason
from .fleet import takeovers_comment, takeovers_in, why_not_begun
from .gate import Gate
from .generation import Generation
from .problems import Problem
from .progress import Beat, Progress
from .report import Report
from .splice import End, Step
from .splicers import splicer_of
from .sse import Event, SseParser, encode_comment
from .upstream import UpstreamLost, content_type, read_all, read_some, unless_interrupted
from .waiting import Waiting
from .watch import Watch

# An engine's last bytes come with its [DONE] or a moment later; waiting for them lets the connection be used again.
_DRAIN_S = 0.25


# Makes the response to a client from its headers: what is written to it need not be all that the client gets.
Respond = Callable[["CIMultiDict[str]"], web.StreamResponse]


class StreamHandler:
    """One streamed session, from its first placement to its end."""

    def __init__(self, generation: Generation, respond: Respond | None = None) -> None:
        self._generation = generation
        self._respond = respond if respond is not None else plain_response
        self._failover = generation.failover
        self._splicer = splicer_of(generation.wishes)
        self._response: web.StreamResponse | None = None
        self._preparing = asyncio.Lock()
        self._closed = False
        self._has_all = False
        self._whole_answer: web.StreamResponse | None = None
        settings = generation.settings
        self._waiting = Waiting(self._write_comment, first_s=settings.keepalive_first_s, every_s=settings.keepalive_s)

    async def run(self, placement: Placement) -> web.StreamResponse:
        """Answer the client; returns when the stream is over."""
        ending = "failed"
        try:
            try:
                problem = await self._go_through_workers(placement)
            except Refused as error:
                problem = problems.refused(error)
            except EngineError as error:
                # An answer that cannot be put into the client's stream; nor could that of another engine be.
                problem = problems.upstream_lost(str(error))
            if problem is None:
                ending = "finished"
                return await self._close()
            return await self._fail(problem)
        except asyncio.CancelledError:
            ending = self._when_left()
            raise
        except ConnectionError:
            # Only writing to the client raises this here: it has left.
            ending = self._when_left()
            return self._response or web.Response(status=499)
        finally:
            # A handler can be cancelled twice: by its client's leaving, and by whoever has the session next.
            try:
                await self._waiting.stop()
            finally:
                self._generation.kept.let_go()
                self._failover.ended(ending, self._tokens())

    def _tokens(self) -> int | None:
        """How many tokens the client has, where they are seen."""
        return len(self._splicer.delivered) if self._splicer.knows_ids else None

    def _when_left(self) -> str:
        """The ending of a session whose client leaves now: one that has everything may."""
        return "finished" if self._closed or self._has_all else "cancelled"

    async def _go_through_workers(self, placement: Placement) -> Problem | None:
        while True:
            wrong = self._splicer.begin(placement.expected)
            if wrong is not None:
                step = Step(b"", End.MISMATCH, reason=Reason.MISMATCH, text=wrong)
            elif placement.finish is not None and self._splicer.may_finish(placement.expected):
                await self._send(Step(self._splicer.close(placement.finish), End.FINISHED, fresh=True), placement)
                return None
            else:
                step = await self._attempt(placement)
            if step.end is End.FINISHED:
                return None
            if self._generation.require_all_heard is not None:
                self._generation.require_all_heard()
            if self._splicer.may_close():
                # All that is lost are formalities: no worker is needed for them.
                await self._send(Step(self._splicer.close(), End.FINISHED, fresh=True), placement)
                return None
            if self._splicer.opaque:
                return problems.upstream_lost(f"{step.text}, after events that the proxy cannot account for")
            obstacle = self._generation.facts.exact_obstacle
            if obstacle and not self._splicer.untouched:
                return problems.upstream_lost(f"{step.text}, and a request with {obstacle!r} cannot go on elsewhere")
            if self._response is not None or step.reason not in (Reason.TURNED_AWAY, Reason.NOT_EXACT):
                # Before anything has begun the answer may yet be that no node takes the request.
                self._waiting.start()
            try:
                placement = await self._failover.take_over(
                    placement,
                    step.reason,
                    step.text,
                    self._splicer.delivered,
                    unseen=not (self._splicer.knows_ids or self._splicer.untouched),
                )
            except Refused as error:
                return problems.refused(error)
            self._generation.kept.until(placement.fetched)

    async def _attempt(self, placement: Placement) -> Step:
        """Read one worker's stream to its end, whatever that is."""
        answer: aiohttp.ClientResponse | None = None
        is_whole = False
        try:
            answer = await self._generation.send(placement)
        except UpstreamLost as lost:
            return _interrupted(lost.reason, str(lost))
        try:
            if answer.status != 200 or content_type(answer.headers) != "text/event-stream":
                return await self._take_other_answer(answer, placement)
            if self._response is None and not self._failover.pending:
                await self._prepare(headers.of_answer(answer.headers, self._generation.request.headers))
            parser = SseParser(self._generation.settings.event_bytes_max)
            step = await self._read(answer, parser, placement)
            if step.end is End.FINISHED and placement.is_node:
                # What it says of its part of the session comes behind the end of the answer, which the client has.
                self._has_all = True
                await self._drain(answer, parser, placement)
                await self._close()
            elif step.end is End.FINISHED:
                await self._close()
                await self._drain(answer, parser, placement)
            elif step.reason is Reason.MOVE:
                self._generation.kept.hold(answer, partial(self._generation.left, placement))
                answer = None
            is_whole = step.end is End.FINISHED
            return step
        finally:
            # Gives the engine's work up, unless its answer was read to the end.
            if answer is not None:
                answer.close()
                if not is_whole:
                    self._generation.left(placement)

    async def _read(self, answer: aiohttp.ClientResponse, parser: SseParser, placement: Placement) -> Step:
        resume = placement.marker.resume
        progress = Progress(len(resume.outputs) if resume is not None else 0, knows_ids=self._splicer.knows_ids)
        unsettled = self._failover.pending
        # Where every token is seen, silence speaks for itself.
        journaled = None if self._splicer.knows_ids else partial(self._failover.journaled, placement)
        stall = self._generation.settings.stall
        stall = stall.of_a_node(sees_tokens=self._splicer.knows_ids) if placement.is_node else stall
        with Watch(answer, placement.interrupted, stall, journaled) as watch:
            while True:
                try:
                    data = await read_some(answer)
                    if placement.gate is not None and placement.gate.is_closed:
                        await self._wait_at(placement.gate, placement, watch)
                    events = parser.feed(data) if data else parser.finish()
                    step = self._splicer.feed(self._heard(events, placement) if placement.is_node else events)
                except UpstreamLost as lost:
                    reason = watch.reason or lost.reason
                    return _interrupted(reason, f"the worker's stream was interrupted: {reason}")
                except EngineError as error:
                    return _interrupted(Reason.ENGINE_ERROR, str(error))
                beat = progress.take(step)
                if beat is Beat.OWN:
                    watch.token()
                elif beat is not Beat.NOTHING or placement.is_node:
                    # A node that says anything is alive, and waits for one of its workers.
                    watch.replayed()
                if unsettled and beat in (Beat.OWN, Beat.PERHAPS_OWN):
                    # From here on it is the new owner's own: may that be sent?
                    await self._failover.settled(placement)
                    unsettled = False
                if step.out:
                    watch.sending = True
                    response = self._response
                    if response is None or self._failover.pending:
                        await self._send(step, placement)
                    else:
                        # What nearly all reads come to; the delay of each token is spent on this path.
                        await response.write(step.out)
                    watch.sending = False
                if step.end is End.CLAIMED:
                    return await self._judge_ending(step, placement)
                if step.end is not End.GOES_ON:
                    return step
                if not data:
                    step = self._splicer.end_of_stream()
                    await self._send(step, placement)
                    return step

    async def _wait_at(self, gate: Gate, placement: Placement, watch: Watch) -> None:
        """Silence is the gate's, and not the worker's. Raises UpstreamLost where what was read is not to be used."""
        watch.sending = True
        passed = await gate.passed(placement.interrupted)
        watch.sending = False
        if not passed:
            reason = placement.interrupted.result()
            raise UpstreamLost(reason, f"the session was interrupted: {reason}")

    async def _judge_ending(self, step: Step, placement: Placement) -> Step:
        """Send an ending on, unless the engine noted elsewhere that it is none."""
        if self._failover.gave_up(placement):
            return _interrupted(step.reason, step.text)
        step = self._splicer.confirm()
        await self._send(step, placement)
        return step

    async def _take_other_answer(self, answer: aiohttp.ClientResponse, placement: Placement) -> Step:
        """Not a stream: the engine's own error, mostly. It is the client's, unless the worker is dying."""
        try:
            body = await unless_interrupted(
                read_all(answer, self._generation.settings.answer_bytes_max),
                placement.interrupted,
                self._generation.kept,
            )
        except UpstreamLost as lost:
            return _interrupted(lost.reason, str(lost))
        except EngineError as error:
            return _interrupted(Reason.ENGINE_ERROR, str(error))
        reason = why_not_begun(answer.status, answer.headers) if placement.is_node else None
        if reason is not None:
            return _interrupted(reason, f"node {placement.worker} answered {answer.status}: {_beginning(body)}")
        if answer.status >= 500:
            await asyncio.wait({placement.interrupted}, timeout=self._generation.settings.error_grace_s)
            if placement.interrupted.done():
                return _interrupted(placement.interrupted.result(), f"the worker answered {answer.status}")
        if self._failover.pending and (self._response is not None or answer.status >= 500):
            return _interrupted(Reason.ENGINE_ERROR, f"the worker answered {answer.status}: {_beginning(body)}")
        kept = headers.of_answer(answer.headers, self._generation.request.headers)
        self._whole_answer = web.Response(status=answer.status, body=body, headers=kept)
        return Step(b"", End.FINISHED)

    async def _prepare(self, kept: "CIMultiDict[str]") -> web.StreamResponse:
        # A comment and the stream may both be the first to need the response.
        async with self._preparing:
            if self._response is None:
                kept.popall("Content-Length", None)
                self._generation.tell_session(kept)
                response = self._respond(kept)
                await response.prepare(self._generation.request)
                self._response = response
        return self._response

    async def _send(self, step: Step, placement: Placement) -> None:
        if not step.out:
            return
        if step.fresh:
            await self._waiting.stop()
        response = await self._prepare(self._own_headers())
        out = step.out
        if step.fresh and self._generation.of_gateway and self._failover.pending:
            # Should this node be lost before it can say what that came to, its gateway must know that it was.
            out = takeovers_comment(self._failover.takeovers_begun) + out
        await response.write(out)
        if step.fresh:
            self._failover.resumed(placement)

    def _heard(self, events: Sequence[Event], placement: Placement) -> Sequence[Event]:
        """What of a node's events is for the client. What it says of takeovers is for us."""
        if all(event.data is not None for event in events):
            return events
        kept = []
        for event in events:
            takeovers = takeovers_in(event.raw) if event.data is None else None
            report = Report.of_comment(event.raw) if event.data is None else None
            if takeovers is not None:
                self._failover.begun_in_node(placement, takeovers)
            elif report is not None:
                self._failover.reported_by_node(placement, report)
            else:
                kept.append(event)
        return kept

    async def _write_comment(self, comment: bytes) -> None:
        await (await self._prepare(self._own_headers())).write(comment)

    def _own_headers(self) -> "CIMultiDict[str]":
        own = CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
        return headers.echo_request_id(own, self._generation.request.headers)

    async def _drain(self, answer: aiohttp.ClientResponse, parser: SseParser, placement: Placement) -> None:
        # The client waits for none of this: it has its answer.
        with suppress(TimeoutError, EngineError):
            async with asyncio.timeout(_DRAIN_S):
                while data := await read_some(answer):
                    if placement.is_node:
                        self._heard(parser.feed(data), placement)

    async def _close(self) -> web.StreamResponse:
        if self._whole_answer is not None:
            return self._whole_answer
        response = await self._prepare(self._own_headers())
        if not self._closed:
            self._closed = True
            if self._generation.wants_report:
                await response.write(encode_comment(str(self._failover.report(self._tokens()))))
            await response.write_eof()
        return response

    async def _fail(self, problem: Problem) -> web.StreamResponse:
        await self._waiting.stop()
        if self._response is None:
            return problem.response(self._generation.request.headers, self._generation.request.path)
        await self._response.write(self._splicer.failing(problem.kind, problem.code, problem.message))
        if self._generation.wants_report:
            await self._response.write(encode_comment(str(Report(Outcome.REFUSED))))
        await self._response.write_eof()
        return self._response


def plain_response(kept: "CIMultiDict[str]") -> web.StreamResponse:
    """A response whose bytes go to the client as they are."""
    return web.StreamResponse(headers=kept)


def _beginning(body: bytes) -> str:
    return body[:300].decode("utf-8", "replace")


def _interrupted(reason: Reason, text: str) -> Step:
    return Step(b"", End.INTERRUPTED, reason=reason, text=text)
