"""The mover's socket: requests in, answers out (docs/formats.md).

Owns connections and the dispatch of operations to those who carry them out. Invariant: every line is answered once,
with the id of its request, and no client can stop another's: lines, connections and requests under way are bounded,
peers of another user are closed, and whatever a request does wrong is an answer. Knows nothing of how anything is
done.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from ...session.errors import MidstreamError
from ..private_socket import peer_uid
from .counters import Counters
from .protocol import LINE_BYTES_MAX, MoverError, Op, Reason, decode_line, encode_line

CONNECTIONS_MAX = 32
REQUESTS_MAX = 128
WRITE_S_MAX = 10.0

_log = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Server:
    """Serves `handlers` on a listening socket."""

    def __init__(self, handlers: dict[Op, Handler], counters: Counters) -> None:
        self._handlers = handlers
        self._counters = counters
        self._connections: set[asyncio.Task[None]] = set()
        self._requests: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled; requests under way are cancelled then, and waited for."""
        server = await asyncio.start_unix_server(self._connected, sock=listener, limit=LINE_BYTES_MAX)
        try:
            async with server:
                await server.serve_forever()
        finally:
            # Requests first: a cancelled restore still answers its engine.
            for tasks in (self._requests, self._connections):
                for task in list(tasks):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = peer_uid(writer.get_extra_info("socket"))
        if peer != os.getuid() or len(self._connections) >= CONNECTIONS_MAX:
            self._counters.requests_refused += 1
            writer.close()
            return
        task = asyncio.create_task(self._serve_connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine: set[asyncio.Task[None]] = set()
        answers = _Answers(writer)
        try:
            await self._read(reader, answers, mine)
        except (OSError, asyncio.IncompleteReadError):
            # The client left; what it asked for goes on, for the engines that wait for it.
            if mine:
                await asyncio.wait(mine)
        finally:
            answers.write()
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, answers: "_Answers", mine: set[asyncio.Task[None]]) -> None:
        while True:
            try:
                line = await reader.readuntil(b"\n")
            except asyncio.LimitOverrunError:
                # Where the next line begins is not known any more.
                self._counters.requests_refused += 1
                await answers.send(_refusal(None, Reason.REQUEST, f"a line is longer than {LINE_BYTES_MAX} bytes"))
                return
            if len(mine) >= REQUESTS_MAX:
                # Not read any further: a client that asks too much waits, and nobody else does.
                await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._answer(line, answers))
            for tasks in (self._requests, mine):
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _answer(self, line: bytes, answers: "_Answers") -> None:
        number: object = None
        try:
            message = decode_line(line)
            number = _id(message)
            reply = {"id": number, "ok": True} | await self._handler(message.get("op"))(message)
        except MoverError as error:
            self._counters.requests_refused += 1
            reply = _refusal(number, error.reason, str(error))
        except MidstreamError as error:
            self._counters.requests_refused += 1
            reply = _refusal(number, Reason.INTERNAL, str(error))
        except Exception as error:
            self._counters.fail(Reason.INTERNAL)
            _log.exception("event=request_failed line=%.200r", line)
            reply = _refusal(number, Reason.INTERNAL, f"{type(error).__name__}: {error}; see the mover's log")
        try:
            await answers.send(reply)
        except OSError as error:
            _log.info("event=answer_lost error=%s", error)

    def _handler(self, op: object) -> Handler:
        if not isinstance(op, str) or op not in self._handlers:
            known = ", ".join(sorted(op.value for op in self._handlers))
            raise MoverError(Reason.REQUEST, f"unknown op {op!r:.40}; use one of {known}")
        return self._handlers[Op(op)]


class _Answers:
    """One connection's way back: whole lines, one after the other, to a client that reads them."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._turn = asyncio.Lock()
        self._together: list[bytes] = []

    async def send(self, reply: dict[str, Any]) -> None:
        """Write an answer; a client that does not read within WRITE_S_MAX loses its connection (OSError)."""
        if not self._together:
            asyncio.get_running_loop().call_soon(self.write)
        self._together.append(encode_line(reply))
        if not self._writer.transport.get_write_buffer_size():
            return
        async with self._turn:
            try:
                async with asyncio.timeout(WRITE_S_MAX):
                    await self._writer.drain()
            except TimeoutError:
                self._writer.transport.abort()
                raise OSError("the client does not read its answers") from None

    def write(self) -> None:
        """Write what was answered at the same time, in one go."""
        lines, self._together = self._together, []
        if lines and not self._writer.is_closing():
            self._writer.write(b"".join(lines))


def _refusal(number: object, reason: Reason, text: str) -> dict[str, Any]:
    return {"id": number, "ok": False, "reason": reason.value, "error": text[:2048]}


def _id(message: dict[str, Any]) -> int | str | None:
    number = message.get("id")
    if number is None or (isinstance(number, int | str) and len(str(number)) <= 64):
        return number
    raise MoverError(Reason.REQUEST, "id must be a number or a string of at most 64 characters")
