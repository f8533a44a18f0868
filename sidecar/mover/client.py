"""The sidecar's client of the mover.

Owns one connection, made when it is first needed and made anew after it broke. Invariant: every call ends within
its time, with an answer or a MoverError; calls at the same time share the connection and get their own answers.
"""

import asyncio
import contextlib
import itertools
from pathlib import Path
from typing import Any

from ...session.ids import SessionId
from .protocol import (
    LINE_BYTES_MAX,
    MoverError,
    Op,
    Reason,
    RestoreResult,
    SnapshotResult,
    StoredResult,
    VerifyResult,
    decode_line,
    encode_line,
    result_from,
)

CALL_S = 5.0
# A mover that was just started may read for so long what is kept in memory.
OPEN_S = 5.0
CONNECT_S = 1.0
CONNECT_AGAIN_S = 0.05
SNAPSHOT_S = 300.0
SEAL_S = 60.0
# What an answer may take longer than the deadline that the mover itself keeps.
GRACE_S = 2.0


class MoverClient:
    """Speaks with the mover at a socket. Close it when it is not needed any more."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def watch(self, arena: Path, worker: str) -> None:
        """Have an arena followed and its blocks summed."""
        await self._ask(Op.WATCH, CALL_S, arena=str(arena), worker=worker)

    async def unwatch(self, arena: Path) -> None:
        """Stop following an arena; it can still be restored from."""
        await self._ask(Op.UNWATCH, CALL_S, arena=str(arena))

    async def seal(self, arena: Path) -> None:
        """Have every block of a dead writer's live sessions summed, so that what scribbles there later is noticed."""
        await self._ask(Op.SEAL, SEAL_S, arena=str(arena))

    async def release(self, arena: Path) -> None:
        """Let go of an arena, its sums and its pool: nothing will be restored from there any more."""
        await self._ask(Op.RELEASE, CALL_S, arena=str(arena))

    async def restore(
        self,
        session: SessionId,
        *,
        origin: SessionId | None = None,
        source: tuple[Path, int] | None,
        to_arena: Path,
        to_generation: int,
        deadline_s: float,
        from_memory: bool = False,
        from_replica: bool = False,
    ) -> RestoreResult:
        """Bring a session's KV from an arena's generation, or from the store (`source=None`), to where it waits.

        With `from_memory` it is from what is kept in memory instead of the store, with `from_replica` from a store
        elsewhere.

        `origin` is the session whose KV that is, where it is not its own but that of the one it is a branch of.

        A restore that fails is a result with `ok=False`, its reason and text, and its engine was told; MoverError means
        that the mover could not be asked, or refused to begin.
        """
        where = "memory" if from_memory else "replica" if from_replica else "store"
        place: dict[str, Any] = {"session": origin or session, where: True}
        if source is not None:
            place = {"session": origin or session, "arena": str(source[0]), "generation": source[1]}
        answer = await self._ask(
            Op.RESTORE,
            deadline_s + GRACE_S,
            failing=True,
            session=session,
            to={"arena": str(to_arena), "generation": to_generation},
            deadline_s=deadline_s,
            **{"from": place},
        )
        return result_from(RestoreResult, answer)

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        """Compare a session's full blocks with their sums."""
        answer = await self._ask(Op.VERIFY, CALL_S, arena=str(arena), session=session, generation=generation)
        return result_from(VerifyResult, answer)

    async def sound(self, arena: Path) -> None:
        """Return if KV may be taken from an arena; MoverError(FAULT) if a fault of a GPU may have touched it."""
        await self._ask(Op.SOUND, CALL_S, arena=str(arena))

    async def snapshot(self, arena: Path, session: SessionId | None = None) -> SnapshotResult:
        """Store all live sessions of an arena, or one, now."""
        answer = await self._ask(Op.SNAPSHOT, SNAPSHOT_S, arena=str(arena), session=session)
        return result_from(SnapshotResult, answer)

    async def stored(self, session: SessionId) -> StoredResult:
        """What a restore from the store would begin with."""
        return result_from(StoredResult, await self._ask(Op.STORED, CALL_S, session=session))

    async def kept(self, session: SessionId) -> StoredResult:
        """What a restore from memory would begin with."""
        return result_from(StoredResult, await self._ask(Op.KEPT, CALL_S + OPEN_S, session=session))

    async def replicated(self, session: SessionId) -> StoredResult:
        """What a restore from a store elsewhere would begin with."""
        return result_from(StoredResult, await self._ask(Op.REPLICATED, CALL_S, session=session))

    async def finish(self, session: SessionId, generation: int) -> None:
        """A session is over: what is stored of it may go first."""
        await self._ask(Op.FINISH, CALL_S, session=session, generation=generation)

    async def status(self) -> dict[str, Any]:
        """The mover's figures by name."""
        answer = await self._ask(Op.STATUS, CALL_S)
        return {name: value for name, value in answer.items() if name not in ("id", "ok")}

    async def close(self) -> None:
        """Close the connection; calls under way end with a MoverError."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _ask(self, op: Op, within_s: float, *, failing: bool = False, **values: Any) -> dict[str, Any]:
        number = next(self._ids)
        line = encode_line({"id": number, "op": op.value, **values})
        if len(line) > LINE_BYTES_MAX:
            raise MoverError(Reason.REQUEST, f"{op}: a request of {len(line)} bytes is too long")
        try:
            async with asyncio.timeout(within_s):
                reply = await self._exchange(number, line)
        except TimeoutError:
            raise MoverError(
                Reason.DEADLINE, f"mover at {self._path} did not answer {op} within {within_s:g} s; look at its log"
            ) from None
        except OSError as error:
            raise self._unreachable(error) from error
        # A restore that failed has figures of its own; a request that was refused has not.
        if reply.get("ok") is True or (failing and "seconds" in reply):
            return reply
        try:
            reason = Reason(reply.get("reason", ""))
        except ValueError:
            reason = Reason.INTERNAL
        raise MoverError(reason, str(reply.get("error", "refused without a reason")))

    async def _exchange(self, number: int, line: bytes) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            try:
                await self._send(line)
            except ConnectionError:
                # The connection was to a mover that is gone, and it was not noticed yet: there may be a new one.
                await self.close()
                self._pending[number] = answer = asyncio.get_running_loop().create_future()
                await self._send(line)
            return await answer
        finally:
            self._pending.pop(number, None)
            answer.cancel()

    async def _send(self, line: bytes) -> None:
        async with self._connecting:
            if self._writer is None or self._reading is None or self._reading.done():
                reader, self._writer = await self._connect()
                self._reading = asyncio.create_task(self._read(reader, self._writer))
            writer = self._writer
        # A loss may be known to the transport before the reader was told; uvloop's then takes nothing any more,
        # and says so with a RuntimeError.
        if writer.is_closing():
            raise ConnectionResetError("the connection was closed")
        try:
            writer.write(line)
        except RuntimeError as error:
            raise ConnectionResetError(str(error)) from error
        await writer.drain()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, with patience for a mover that is just being started again."""
        give_up_s = asyncio.get_running_loop().time() + CONNECT_S
        while True:
            try:
                return await asyncio.open_unix_connection(self._path, limit=LINE_BYTES_MAX)
            except OSError:
                if asyncio.get_running_loop().time() >= give_up_s:
                    raise
                await asyncio.sleep(CONNECT_AGAIN_S)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        error: Exception = OSError("the connection was closed")
        try:
            while True:
                reply = decode_line(await reader.readuntil(b"\n"))
                waiting = self._pending.get(reply.get("id", 0))
                if waiting is not None and not waiting.done():
                    waiting.set_result(reply)
        except (OSError, MoverError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as caught:
            error = caught
        finally:
            writer.close()
            pending, self._pending = self._pending, {}
            for waiting in pending.values():
                if not waiting.done():
                    waiting.set_exception(self._unreachable(error))

    def _unreachable(self, error: Exception) -> MoverError:
        return MoverError(
            Reason.UNREACHABLE, f"mover at {self._path}: {error}; sessions are recomputed until it is back"
        )
