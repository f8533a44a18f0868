"""Runs the choices of one request side by side, each a session of its own, and answers the client once.

Owns the client's response while several handlers write to it. Invariant: nothing is sent before every choice's worker
has taken its request, or has had `_BEGIN_S` for that: what is refused before is refused as a whole, and a later refusal
ends the stream in one error. Each write holds whole events of one choice; and when one choice fails for good, or the
client leaves, all others are given up, and every session is reported ended. A choice whose turn it is not waits, and so
does its engine: nothing is collected here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from . import headers, problems
from .choices import Part
from .choices_merge import MergedStream, NotMergeable, merged_bodies
from .coordinator import Placement
from .dialects import openai
from .generation import Generation
from .prompt_ask import graft_of, with_all_ids, with_part
from .prompt_part import PromptPart, StreamGraft
from .report import Report
from .sse import encode_comment, encode_event
from .stream import Respond, StreamHandler
from .unary import UnaryHandler

# Engines answer as soon as they have taken a request. One that waits for room before it does must not make the others'
# streams wait for ever.
_BEGIN_S = 5.0

AnyResponse = TypeVar("AnyResponse", bound=web.StreamResponse)
Start = Callable[[int], Coroutine[Any, Any, web.StreamResponse]]


class ChoicesHandler:
    """One request with several choices.

    `told` is what is known of each prompt besides, `answer` what the id of their answer is made of, and `respond` makes
    the response of a stream.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        started: Sequence[tuple[Generation, Placement]],
        told: Sequence[PromptPart | None],
        answer: str,
        respond: Respond,
    ) -> None:
        generations = [generation for generation, _ in started]
        self._generations = generations
        self._placements = [placement for _, placement in started]
        self._told = [told[part.prompt] for part in parts]
        self._prompts = [part.prompt for part in parts]
        self._sessions = [generation.facts.session for generation in generations]
        # With several prompts the drawn seeds are no client's: it counts its own anew for each prompt.
        self._names = _Names(self._sessions, None if parts[-1].prompt else generations[0].facts.seed)
        self._answer = answer
        self._respond = respond
        self._request = generations[0].request

    async def run(self) -> web.StreamResponse:
        """Answer the client."""
        return await (self._stream() if self._generations[0].facts.stream else self._whole())

    async def _stream(self) -> web.StreamResponse:
        bytes_max = self._generations[0].settings.event_bytes_max
        merged = MergedStream(self._prompts, self._sessions, self._answer, bytes_max)
        running = _Running(self._generations)
        mouth = _Mouth(self._request, merged, self._names, running.give_up_others, self._respond)

        async def start(index: int) -> web.StreamResponse:
            generation = self._generations[index]
            graft = graft_of(generation, self._told[index])
            if graft is not None:
                generation = with_all_ids(generation)

            def respond(kept: "CIMultiDict[str]") -> web.StreamResponse:
                return _Voice(mouth, index, kept, graft)

            return await StreamHandler(generation, respond).run(self._placements[index])

        async with running:
            running.start(start)
            async for index, got in running.ended():
                if isinstance(got, web.Response):
                    # An error before the choice's stream.
                    if not mouth.opened:
                        return self._names.on(got)
                    running.give_up_others(index)
                    await mouth.refuse(got)
            return await mouth.close()

    async def _whole(self) -> web.StreamResponse:
        answers: dict[int, web.Response] = {}

        async def start(index: int) -> web.StreamResponse:
            answer = await UnaryHandler(self._generations[index]).run(self._placements[index])
            return with_part(answer, self._told[index], self._request)

        async with _Running(self._generations) as running:
            running.start(start)
            async for index, got in running.ended():
                assert isinstance(got, web.Response)
                if got.status != 200:
                    return self._names.on(got)
                answers[index] = got
        return self._together([answers[index] for index in range(len(self._generations))])

    def _together(self, answers: Sequence[web.Response]) -> web.Response:
        try:
            bodies = [answer.body if isinstance(answer.body, bytes) else b"" for answer in answers]
            body = merged_bodies(bodies, self._prompts, self._sessions, self._answer)
        except NotMergeable as error:
            return problems.upstream_lost(str(error)).response(self._request.headers)
        kept = CIMultiDict(answers[0].headers)
        kept.popall("Content-Length", None)
        reports = [report for answer in answers if (report := Report.of_headers(answer.headers)) is not None]
        told = Report.of_all(reports)
        if told is not None:
            kept.update(told.headers())
        return self._names.on(web.Response(body=body, headers=kept))


class _Running:
    """The handlers of all choices: a context at whose end none of them is left."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._tasks: list[asyncio.Task[web.StreamResponse]] = []
        self._cancelled: set[int] = set()
        self._last: int | None = None

    async def __aenter__(self) -> "_Running":
        return self

    async def __aexit__(self, *_: object) -> None:
        for index in range(len(self._tasks)):
            self._cancel(index)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generation in self._generations:
            # A task that was cancelled before its first step has reported nothing.
            generation.failover.ended("cancelled")

    def start(self, start: Start) -> None:
        """Start one handler a choice."""
        self._tasks = [asyncio.create_task(start(index)) for index in range(len(self._generations))]

    def give_up_others(self, index: int) -> None:
        """One choice has failed for good, or has lost the client: the first of these alone goes on, to its end."""
        if self._last is None:
            self._last = index
            for other in range(len(self._tasks)):
                if other != index:
                    self._cancel(other)

    def _cancel(self, index: int) -> None:
        # Once: a handler that cleans up must not be cancelled again in the midst of that.
        if index not in self._cancelled:
            self._cancelled.add(index)
            self._tasks[index].cancel()

    async def ended(self) -> AsyncIterator[tuple[int, web.StreamResponse]]:
        """Each choice's index and what its handler came to, as they end; without those that were given up."""
        waiting = set(self._tasks)
        while waiting:
            over, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in over:
                if not task.cancelled():
                    yield self._tasks.index(task), task.result()


class _Mouth:
    """Says to the client what the choices say. `fail` is told of the choice with which the stream ends early."""

    def __init__(
        self,
        request: web.Request,
        merged: MergedStream,
        names: "_Names",
        fail: Callable[[int], None],
        respond: Respond,
    ) -> None:
        self._respond = respond
        self._request = request
        self._merged = merged
        self._names = names
        self._fail = fail
        self._begun: set[int] = set()
        self._opened = asyncio.Event()
        self._response: web.StreamResponse | None = None
        self._writing = asyncio.Lock()
        self._left = False

    @property
    def opened(self) -> bool:
        """Whether the client's stream has begun."""
        return self._response is not None

    async def begin(self, index: int, kept: "CIMultiDict[str]") -> None:
        """A choice's worker has taken its request. Returns when all have, or have had time to."""
        self._begun.add(index)
        if len(self._begun) < len(self._names.sessions):
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEGIN_S):
                    await self._opened.wait()
        async with self._writing:
            if self._response is None:
                response = self._names.on(self._respond(kept))
                with self._noticing(index):
                    await response.prepare(self._request)
                self._response = response
                self._opened.set()

    async def write(self, index: int, data: bytes) -> None:
        """Send on what a choice's stream says, as fast as the client takes it."""
        async with self._writing:
            out = self._merged.take(index, data)
            if self._merged.failed is not None:
                self._fail(self._merged.failed)
            if out and self._response is not None:
                with self._noticing(index):
                    await self._response.write(out)

    async def refuse(self, answer: web.Response) -> None:
        """A choice was refused when others had begun: the stream ends with the error that it got."""
        assert self._response is not None
        if not self._left and self._merged.fail():
            with suppress(ConnectionError):
                await self._response.write(_error_event(answer))

    async def close(self) -> web.StreamResponse:
        """All choices are over: end the client's stream."""
        response = self._response
        if response is None or self._left:
            return response or web.Response(status=499)
        ending = self._merged.ending() if self._merged.complete else b""
        report = self._merged.report()
        if report is not None:
            ending += encode_comment(str(report))
        # Who leaves now has everything, and every session has ended.
        with suppress(ConnectionError):
            if ending:
                await response.write(ending)
            await response.write_eof()
        return response

    @contextmanager
    def _noticing(self, index: int) -> Iterator[None]:
        """Whether the client is still there: only writing to it raises this here."""
        try:
            yield
        except ConnectionError:
            self._left = True
            self._fail(index)
            raise


class _Voice(web.StreamResponse):
    """What a choice's handler takes for the response to its client."""

    def __init__(self, mouth: _Mouth, index: int, kept: "CIMultiDict[str]", graft: StreamGraft | None) -> None:
        super().__init__(headers=kept)
        self._mouth = mouth
        self._index = index
        self._graft = graft

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Wait for the other choices."""
        await self._mouth.begin(self._index, self.headers)
        return None

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send some events of this choice."""
        await self._mouth.write(self._index, bytes(data) if self._graft is None else self._graft.take(bytes(data)))

    async def write_eof(self, data: bytes = b"") -> None:
        """This choice is over; the stream is not."""


def _error_event(answer: web.Response) -> bytes:
    """An error that is a whole answer, as the last event of a stream."""
    body = answer.body if isinstance(answer.body, bytes) else b""
    chunk = openai.decode_chunk(body)
    if chunk is not None and chunk.error is not None:
        return encode_event(body)
    text = f"the engine answered {answer.status} for one of the choices: {body[:300].decode('utf-8', 'replace')}"
    return problems.upstream_lost(text).event()


@dataclass(frozen=True, slots=True)
class _Names:
    """What the headers of the one answer say of its choices; `seed` is the one with which to ask for it again."""

    sessions: Sequence[str]
    seed: int | None

    def on(self, answer: AnyResponse) -> AnyResponse:
        """Name all sessions of an answer that names one of them, and the seed of all instead of that one's."""
        answer.headers.popall(headers.SEED, None)
        if headers.SESSION in answer.headers:
            answer.headers[headers.SESSION] = ", ".join(self.sessions)
            if self.seed is not None:
                answer.headers[headers.SEED] = str(self.seed)
        return answer
