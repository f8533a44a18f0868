"""A simulated engine: journals, block tables and KV as real engines write them, and no arithmetic.

A position's KV is a proof of all tokens up to it and a *flavour*: 0 as decoding makes it, 1 where outputs were
prefilled again, whose rounding may differ. A token is its own index and a digit that depends on all tokens and
flavours before it. So a token that is lost or repeated shows by its index, one computed from other KV by its digit,
and KV that is not of the session's own tokens is noticed in the step that uses it. A step sleeps between its parts,
so that a kill falls between any two of them.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from zlib import crc32

from midstream.adapters.prompt import prompt_hash
from midstream.session.arena import ArenaReader, SlotState
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.ids import SessionId
from midstream.session.marker import KvSource, Marker
from midstream.session.records import LoadState

BLOCK_TOKENS = 4
INDEX = 10
LOAD_TIMEOUT_S = 0.4


class SilentlyWrong(AssertionError):
    """An engine computed from KV that is not its session's."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A client's request: `length` outputs in all, then `finish`."""

    session: SessionId
    prompt: tuple[int, ...]
    length: int
    finish: str


@dataclass(frozen=True, slots=True)
class Said:
    """One event of an engine's stream; `finish` with the last tokens."""

    tokens: tuple[int, ...]
    finish: str = ""


LOST = None
Cell = tuple[int, int]


@dataclass(slots=True, eq=False)
class SimPool:
    """KV memory: blocks of cells. Adopted pools are this very object."""

    name: str
    blocks: list[list[Cell | None]]

    @classmethod
    def make(cls, name: str, count: int) -> "SimPool":
        return cls(name, [[None] * BLOCK_TOKENS for _ in range(count)])


def proofs(tokens: Sequence[int]) -> list[int]:
    """For each position, what its KV must prove."""
    found, check = [], 0
    for token in tokens:
        check = crc32(token.to_bytes(4, "little"), check)
        found.append(check)
    return found


def next_token(tokens: Sequence[int], outputs: int, flavours: int) -> int:
    """The token after `tokens`, of which `outputs` are outputs."""
    return outputs * INDEX + crc32(repr((tokens, flavours)).encode()) % INDEX


def undisturbed(ask: Ask) -> list[int]:
    """What the session says if nothing ever happens to it."""
    tokens = list(ask.prompt)
    for count in range(ask.length):
        tokens.append(next_token(tokens, count, 0))
    return tokens[len(ask.prompt) :]


class Phase(Enum):
    NEW = auto()
    LOADING = auto()
    PREFILL = auto()
    DECODING = auto()


@dataclass(slots=True, eq=False)
class Run:
    """One request in an engine."""

    ask: Ask
    marker: Marker
    outputs: list[int]
    stream: "asyncio.Queue[Said | None]" = field(default_factory=asyncio.Queue)
    slot: SlotWriter | None = None
    blocks: list[int] = field(default_factory=list)
    phase: Phase = Phase.NEW
    deadline_s: float = 0.0
    aborted: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.ask.prompt, *self.outputs]

    @property
    def resumed(self) -> bool:
        return self.marker.resume is not None


class SimEngine:
    """One epoch of an engine. Without an arena it has no plugin, and runs every request from its beginning."""

    def __init__(self, rng: random.Random, arena: Path | None, pool: SimPool, adopt: Path | None) -> None:
        self._rng = rng
        self._writer = None if arena is None else ArenaWriter(arena)
        self.pool = pool
        self.runs: list[Run] = []
        self.alive = True
        self.paused = asyncio.Event()
        self.paused.set()
        self._latency_s = rng.uniform(0.0, 0.03)
        # Some front ends replay what is re-entered at once, some with the first token that is computed.
        self._replays_early = rng.random() < 0.5
        self._free = list(range(len(pool.blocks)))
        self._quarantine: list[tuple[SlotWriter, list[int]]] = []
        self._adopt = adopt
        self._reserved = {} if adopt is None else _reserved(adopt)
        taken = {block for blocks in self._reserved.values() for block in blocks}
        self._free = [block for block in self._free if block not in taken]

    def publish(self, facts: dict[str, object]) -> None:
        if self._writer is not None:
            self._writer.publish(facts)

    def submit(self, ask: Ask, marker: Marker) -> Run:
        """A request arrives."""
        resume = marker.resume if self._writer is not None else None
        run = Run(ask, marker, list(resume.outputs) if resume is not None else [])
        if resume is not None and resume.finish:
            self._say(run, Said(resume.outputs, resume.finish))
            return run
        self.runs.append(run)
        if run.outputs and self._replays_early:
            self._say(run, Said(tuple(run.outputs)))
        return run

    async def serve(self) -> None:
        """Until killed."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.005, 0.04))
            self._housekeeping()
            for run in list(self.runs):
                await self.paused.wait()
                await self._step(run)

    def kill(self) -> None:
        """SIGKILL: what was written stays, nothing more is said."""
        self.alive = False
        if self._writer is not None:
            self._writer.close()

    def drop_connections(self) -> None:
        for run in self.runs:
            run.stream.put_nowait(LOST)

    def _housekeeping(self) -> None:
        if self._adopt is not None and not self._adopt.exists():
            # The sidecar removes the old arena when nobody can come back any more.
            for blocks in self._reserved.values():
                self._free += blocks
            self._reserved = {}
        for slot, blocks in list(self._quarantine):
            if slot.inbox()[0] is not LoadState.NONE:
                self._quarantine.remove((slot, blocks))
                self._free += blocks

    async def _step(self, run: Run) -> None:
        if run.aborted:
            self._end(run, "abort")
            return
        if run.phase is Phase.NEW:
            self._begin(run)
        elif run.phase is Phase.LOADING:
            self._look_for_load(run)
        elif run.phase is Phase.PREFILL:
            await self._prefill(run)
        else:
            await self._decode(run)

    def _begin(self, run: Run) -> None:
        """Admit it, and make room for the KV of all but its newest token."""
        needed = len(run.tokens) // BLOCK_TOKENS + 1
        resume = run.marker.resume
        if run.slot is None and self._writer is not None:
            fingerprint = prompt_hash(run.ask.prompt)
            marker = run.marker
            run.slot = self._writer.admit(
                marker.session, marker.generation, len(run.ask.prompt), fingerprint, run.outputs
            )
            if resume is not None and resume.kv is not KvSource.NONE and resume.prompt_hash != fingerprint:
                raise SilentlyWrong(f"session {marker.session}: KV is offered for another prompt")
        wants = resume.kv if resume is not None and run.outputs and run.slot is not None else KvSource.NONE
        reserved = self._reserved.pop(run.marker.session, [])
        if wants is KvSource.IN_PLACE and len(reserved) * BLOCK_TOKENS >= len(run.tokens) - 1:
            run.blocks, run.phase = reserved, Phase.DECODING
            assert run.slot is not None
            run.slot.set_blocks(run.blocks)
            run.slot.report(LoadState.DONE, len(run.tokens) - 1, 1)
            return
        if wants is KvSource.IN_PLACE or wants is KvSource.NONE:
            self._free += reserved
        elif reserved:
            # A copy out of this very pool: the old blocks wait until it is done.
            self._reserved[run.marker.session] = reserved
        if len(self._free) < needed:
            return
        run.blocks = [self._free.pop(0) for _ in range(needed)]
        if run.slot is not None:
            run.slot.set_blocks(run.blocks)
        run.phase = Phase.PREFILL
        if wants in (KvSource.HELD, KvSource.DISK) and run.slot is not None:
            run.phase = Phase.LOADING
            run.deadline_s = asyncio.get_running_loop().time() + LOAD_TIMEOUT_S
            run.slot.report(LoadState.WAITING, 0, 0)

    def _look_for_load(self, run: Run) -> None:
        assert run.slot is not None
        state, tokens = run.slot.inbox()
        needed = len(run.tokens) - 1
        if state is LoadState.DONE and tokens >= needed:
            run.slot.report(LoadState.DONE, needed, 1)
            run.phase = Phase.DECODING
        elif state is not LoadState.NONE or asyncio.get_running_loop().time() >= run.deadline_s:
            run.slot.report(LoadState.FAILED, 0, 0)
            if state is LoadState.NONE:
                self._quarantine.append((run.slot, run.blocks))
            else:
                self._free += run.blocks
            run.blocks, run.phase = [], Phase.PREFILL
        else:
            return
        self._free += self._reserved.pop(run.marker.session, [])

    async def _prefill(self, run: Run) -> None:
        needed = len(run.tokens) // BLOCK_TOKENS + 1
        if not run.blocks:
            if len(self._free) < needed:
                return
            run.blocks = [self._free.pop(0) for _ in range(needed)]
            if run.slot is not None:
                run.slot.set_blocks(run.blocks)
        if run.resumed and run.outputs and run.slot is not None:
            run.slot.report(LoadState.FAILED, 0, len(run.tokens))
        for position, proof in enumerate(proofs(run.tokens[:-1])):
            self._write(run, position, (proof, int(position >= len(run.ask.prompt))))
            if position % BLOCK_TOKENS == 0:
                await asyncio.sleep(0.001)
        run.phase = Phase.DECODING

    async def _decode(self, run: Run) -> None:
        position = len(run.tokens) - 1
        if position >= len(run.blocks) * BLOCK_TOKENS:
            if not self._free:
                return
            run.blocks.append(self._free.pop(0))
            if run.slot is not None:
                run.slot.append_blocks(run.blocks[-1:])
        wanted = proofs(run.tokens)
        self._write(run, position, (wanted[-1], 0))
        await asyncio.sleep(self._rng.uniform(0.0, 0.004))
        cells = [self.pool.blocks[run.blocks[p // BLOCK_TOKENS]][p % BLOCK_TOKENS] for p in range(position + 1)]
        if [None if cell is None else cell[0] for cell in cells] != wanted:
            raise SilentlyWrong(f"session {run.marker.session} generation {run.marker.generation}: foreign KV")
        flavours = sum(cell[1] for cell in cells if cell is not None)
        token = next_token(run.tokens, len(run.outputs), flavours)
        if run.slot is not None:
            run.slot.append_tokens([token])
        resume = run.marker.resume
        replays = resume is not None and not self._replays_early and len(run.outputs) == len(resume.outputs)
        said = (*run.outputs, token) if replays else (token,)
        run.outputs.append(token)
        if len(run.outputs) >= run.ask.length:
            self._end(run, run.ask.finish)
            await asyncio.sleep(self._rng.uniform(0.0, 0.004))
            self._say(run, Said(said, run.ask.finish))
        else:
            self._say(run, Said(said))

    def _write(self, run: Run, position: int, cell: Cell) -> None:
        self.pool.blocks[run.blocks[position // BLOCK_TOKENS]][position % BLOCK_TOKENS] = cell

    def _end(self, run: Run, finish: str) -> None:
        self.runs.remove(run)
        if run.slot is not None:
            run.slot.finish(finish)
        self._free += self._reserved.pop(run.marker.session, [])
        if run.phase is Phase.LOADING and run.slot is not None and run.slot.inbox()[0] is LoadState.NONE:
            self._quarantine.append((run.slot, run.blocks))
        else:
            self._free += run.blocks

    def _say(self, run: Run, said: Said) -> None:
        """Through the front end: later, and only if it lives then."""
        asyncio.get_running_loop().call_later(self._latency_s, self._deliver, run, said)

    def _deliver(self, run: Run, said: Said) -> None:
        if self.alive:
            run.stream.put_nowait(said)


def _reserved(arena: Path) -> dict[SessionId, list[int]]:
    reader = ArenaReader(arena)
    try:
        return {
            slot.session: list(reader.table(slot).blocks)
            for slot in sorted(reader.slots(), key=lambda slot: slot.generation)
            if slot.state is SlotState.LIVE and reader.journal(slot)
        }
    finally:
        reader.close()
