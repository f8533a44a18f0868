"""Asks workers about a request's prompts, and puts what they tell into the answers on their way to the client.

Invariant: nothing of the answer is begun before all prompts are known, and an engine's refusal of a question is the
answer to the request. A question changes nothing and can be asked again, so it goes from worker to worker as any
unstreamed request does. What is put where is `prompt_part`'s to know.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from . import problems
from .coordinator import Placement
from .dialects.by_path import CHAT_PATH
from .generation import Generation
from .prompt_part import NoPromptPart, PromptPart, StreamGraft
from .stream import Respond
from .unary import UnaryHandler


async def ask(questions: Sequence[tuple[Generation, Placement]], *, echo: bool) -> "list[PromptPart] | web.Response":
    """What workers tell of each prompt; or the first answer that is none."""
    asking = [asyncio.create_task(UnaryHandler(generation).run(placement)) for generation, placement in questions]
    try:
        answers = await asyncio.gather(*asking)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for generation, _ in questions:
            # One that was cancelled before its first step has reported nothing.
            generation.failover.ended("cancelled")
    parts: list[PromptPart] = []
    request = questions[0][0].request
    for answer in answers:
        assert isinstance(answer, web.Response)
        if answer.status != 200:
            return answer
        try:
            parts.append(PromptPart.of(_body(answer), echo=echo, chat=request.path == CHAT_PATH))
        except NoPromptPart as error:
            return problems.upstream_lost(str(error)).response(request.headers, request.path)
    return parts


def with_part(answer: web.StreamResponse, part: PromptPart | None, request: web.Request) -> web.StreamResponse:
    """An unstreamed answer with its prompt's part. Errors, and answers that have none, stay as they are."""
    if part is None or not isinstance(answer, web.Response) or answer.status != 200:
        return answer
    try:
        body = part.whole(_body(answer), chat=request.path == CHAT_PATH)
    except NoPromptPart as error:
        return problems.upstream_lost(str(error)).response(request.headers, request.path)
    kept = CIMultiDict(answer.headers)
    kept.popall("Content-Length", None)
    return web.Response(body=body, headers=kept)


def graft_of(generation: Generation, part: PromptPart | None) -> StreamGraft | None:
    """What puts a prompt's part into a session's stream; None where there is none."""
    if part is None:
        return None
    return StreamGraft(part, generation.wishes.hiding, generation.settings.event_bytes_max)


def with_all_ids(generation: Generation) -> Generation:
    """A stream's request as it has to be for a graft: with the ids in it, which the graft hides."""
    return replace(generation, wishes=replace(generation.wishes, hiding=None))


def respond_with(graft: StreamGraft, respond: Respond) -> Respond:
    """Makes the response of a stream that begins with its prompt's part, out of another one."""
    return lambda kept: _Grafted(graft, respond(kept))


class _Grafted(web.StreamResponse):
    """A response to a client, into which the prompt's part is put."""

    def __init__(self, graft: StreamGraft, response: web.StreamResponse) -> None:
        super().__init__(headers=response.headers)
        self._graft = graft
        self._response = response

    @property
    def keep_alive(self) -> bool | None:
        """Whether the connection may be used again; known when the head is out."""
        return self._response.keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send the head."""
        return await self._response.prepare(request)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send some events."""
        out = self._graft.take(bytes(data))
        if out:
            await self._response.write(out)

    async def write_eof(self, data: bytes = b"") -> None:
        """The stream is over."""
        await self._response.write_eof(data)


def _body(answer: web.Response) -> bytes:
    return answer.body if isinstance(answer.body, bytes) else b""
