"""The engine's account in the arena, which never gets in the way of serving.

Owns the promise that no failure of the snapshot side reaches a stream: whatever goes wrong is logged once, counted, and
the session goes on without a record. Used from the decode thread alone.
"""

import logging
from collections.abc import Sequence
from typing import Any

from ...session.arena import Counter, LoadState
from ...session.arena_writer import ArenaWriter, SlotWriter
from ...session.ids import SessionId

log = logging.getLogger("midstream.transformers")


class Recorder:
    """Gives sessions a record, or one that records nothing."""

    def __init__(self, arena: ArenaWriter | None) -> None:
        self._arena = arena
        self.unrecorded_count = 0
        self.errors_count = 0

    def admit(
        self, session: SessionId, generation: int, prompt_len: int, prompt_hash: str, outputs: Sequence[int]
    ) -> "Record":
        """A record for a session; `alive` says whether it is a real one."""
        slot: SlotWriter | None = None
        if self._arena is not None:
            try:
                slot = self._arena.admit(session, generation, prompt_len, prompt_hash, outputs)
            except Exception as error:
                self.failed("admit", error)
        if slot is None:
            self._without(session)
        return Record(self, slot)

    def count(self, counter: Counter) -> None:
        """Count something where the sidecar sees it."""
        if self._arena is not None:
            try:
                self._arena.count(counter)
            except Exception as error:
                self.failed("count", error)

    def failed(self, call: str, error: Exception) -> None:
        """Note that a call into the arena raised."""
        self.errors_count += 1
        if self.errors_count == 1:
            log.warning("event=record_failed call=%s error=%r effect=session_without_snapshot", call, error)
        if self._arena is not None and call != "count":
            self.count(Counter.HOOK_ERRORS)

    def close(self) -> None:
        """Unmap the arena; its file keeps all that was written."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _without(self, session: SessionId) -> None:
        self.unrecorded_count += 1
        if self._arena is not None and self.unrecorded_count == 1:
            log.warning("event=unrecorded session=%s reason=arena_full effect=served_without_snapshot", session)


class Record:
    """One session's record. Calls after it was lost do nothing."""

    def __init__(self, recorder: Recorder | None, slot: SlotWriter | None) -> None:
        self._recorder = recorder
        self._slot = slot

    @property
    def alive(self) -> bool:
        """Whether the session can be taken up from here."""
        return self._slot is not None and self._slot.alive

    def blocks(self, ids: Sequence[int]) -> None:
        """Write the block table, before the step that uses it."""
        self._call("set_blocks", ids)

    def token(self, token: int) -> None:
        """Journal an output token, before it can reach anybody."""
        self._call("append_tokens", (token,))

    def report(self, load: LoadState, loaded: int, recomputed: int) -> None:
        """Say how the KV of a resumed session came."""
        self._call("report", load, loaded, recomputed)

    def inbox(self) -> tuple[LoadState, int]:
        """The mover's answer; FAILED when there is no record that it could answer to."""
        answer = self._call("inbox")
        return (LoadState.FAILED, 0) if answer is None else answer

    @property
    def answered(self) -> bool:
        """Whether the mover has let go of this session's blocks."""
        return self._slot is not None and self._slot.inbox()[0] is not LoadState.NONE

    def end(self, reason: str) -> None:
        """The session is over and its blocks are about to be another's: void the table, then say so."""
        self._call("set_blocks", ())
        self._call("finish", reason)

    def _call(self, name: str, *args: Any) -> Any:
        if self._slot is None or not self._slot.alive:
            return None
        try:
            return getattr(self._slot, name)(*args)
        except Exception as error:
            if self._recorder is not None:
                self._recorder.failed(name, error)
            self._slot = None
            return None
