"""Which blocks of which sessions are kept, and who must give way when there is no more room. Pure.

Owns the chains: one a session, its blocks from the first one on without a gap. Invariant: each block of a chain
continues the digest of the one before it. Slabs that a chain lets go of are handed out through `let_go` once, and only
when nobody reads the chain any more.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...session.ids import SessionId
from .memory_area import Slab
from .memory_records import Record, Story, linked
from .pools import SumKind

SESSIONS_MAX = 65536


@dataclass(frozen=True, slots=True)
class Kept:
    """A block that is kept: where, how much of it means something, its sum and its place in the chain.

    `owner` are the generation and the table generation under which it was the session's last.
    """

    slab: Slab
    owner: tuple[int, int]
    positions: int
    kind: SumKind
    sum: int
    chain: bytes
    tokens: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Chain:
    """The kept blocks of one session.

    `generation` is that of its newest owner, `wanted` how many blocks that one has, `live` whether an engine has it,
    and `left_s` when the last one has left it. `began` grows from session to session.
    """

    story: Story
    generation: int
    began: int
    full: list[Kept] = field(default_factory=list)
    tail: Kept | None = None
    wanted: int = 0
    live: bool = False
    left_s: float = 0.0
    dropped: bool = False
    readers: int = 0
    waiting: list[Slab] = field(default_factory=list)

    @property
    def kv_len(self) -> int:
        """How many positions are kept, from the first one on."""
        return len(self.full) * self.story.form[1] + (self.tail.positions if self.tail is not None else 0)

    @property
    def outputs(self) -> list[int]:
        """The outputs at these positions."""
        return [token for kept in self.blocks for token in kept.tokens]

    @property
    def blocks(self) -> list[Kept]:
        """All of them in order."""
        return self.full if self.tail is None else [*self.full, self.tail]

    def before(self, ordinal: int) -> bytes:
        """The digest that block `ordinal` continues; all before it are kept."""
        return self.full[ordinal - 1].chain if ordinal else self.story.root()

    @property
    def rank(self) -> tuple[bool, int, int]:
        """What it is worth: more is better. Somebody's, of many blocks, new."""
        return self.live, max(self.wanted, len(self.full)).bit_length(), self.began


class MemoryIndex:
    """The chains of all sessions. `let_go` is told of slabs that are free, `forget` of those that are read still."""

    def __init__(self, forget: Callable[[Sequence[Slab]], object], let_go: Callable[[Sequence[Slab]], object]) -> None:
        self._forget = forget
        self._let_go = let_go
        self._chains: dict[SessionId, Chain] = {}
        # In which order sessions were first seen: one that had to give way does not come back as a new one.
        self._order: OrderedDict[SessionId, int] = OrderedDict()
        self._began = 0

    @property
    def chains(self) -> list[Chain]:
        """All of them."""
        return list(self._chains.values())

    def get(self, session: SessionId) -> Chain | None:
        """The chain of a session."""
        return self._chains.get(session)

    def begin(self, story: Story, generation: int) -> Chain:
        """The chain of a session, a new one if what is kept is of another story."""
        chain = self._chains.get(story.session)
        if chain is not None and chain.story != story:
            self.drop(chain)
            chain = None
        if chain is None:
            chain = self._chains[story.session] = Chain(story, generation, self._place_of(story.session))
        chain.generation = max(chain.generation, generation)
        return chain

    def _place_of(self, session: SessionId) -> int:
        if session not in self._order:
            self._began += 1
            self._order[session] = self._began
            if len(self._order) > SESSIONS_MAX:
                self._order.popitem(last=False)
        return self._order[session]

    def add(self, chain: Chain, kept: Kept) -> None:
        """One more full block; a tail that was kept of it is not needed any more."""
        self.drop_tail(chain)
        chain.full.append(kept)

    def renew(self, chain: Chain, ordinal: int, kept: Kept) -> None:
        """A full block is the session's under another owner, too."""
        chain.full[ordinal] = kept

    def set_tail(self, chain: Chain, kept: Kept) -> None:
        """The part of a block after the full ones."""
        self.drop_tail(chain)
        chain.tail = kept

    def drop_tail(self, chain: Chain) -> None:
        """Without it."""
        if chain.tail is not None:
            self._free(chain, [chain.tail.slab])
            chain.tail = None

    def cut(self, chain: Chain, count: int) -> None:
        """Keep the first `count` full blocks alone."""
        self.drop_tail(chain)
        self._free(chain, [kept.slab for kept in chain.full[count:]])
        del chain.full[count:]

    def drop(self, chain: Chain) -> None:
        """Let a session go."""
        if not chain.dropped:
            chain.dropped = True
            del self._chains[chain.story.session]
            self.cut(chain, 0)

    def victims(self, chain: Chain) -> list[Chain]:
        """Who gives way for a chain, first the one that is worth least; none that is worth as much as it."""
        able = [c for c in self._chains.values() if c is not chain and c.rank < chain.rank and c.blocks]
        return sorted(able, key=lambda c: c.rank)

    def read(self, chain: Chain) -> None:
        """Somebody begins to read the bytes of a chain."""
        chain.readers += 1

    def have_read(self, chain: Chain) -> None:
        """He has."""
        chain.readers -= 1
        if not chain.readers and chain.waiting:
            waiting, chain.waiting = chain.waiting, []
            self._let_go(waiting)

    def take_over(self, found: Iterable[tuple[Slab, Record]], now_s: float) -> None:
        """Make chains of what was found in an area; blocks that are of no chain are free then."""
        by_story: dict[Story, dict[int, list[tuple[Slab, Record]]]] = {}
        for slab, record in found:
            by_story.setdefault(record.story, {}).setdefault(record.ordinal, []).append((slab, record))
        free: list[Slab] = []
        # Of a session with two stories the newer one counts, and `begin` lets the other go.
        for story, by_ordinal in sorted(by_story.items(), key=lambda item: _newest(item[1])):
            full, tail = _longest(story, by_ordinal)
            blocks = full if tail is None else [*full, tail]
            used = {kept.slab for kept in blocks}
            free += [slab for records in by_ordinal.values() for slab, _ in records if slab not in used]
            if blocks:
                chain = self.begin(story, max(kept.owner[0] for kept in blocks))
                chain.full, chain.tail, chain.wanted, chain.left_s = full, tail, len(blocks), now_s
        self._let_go(free)

    def _free(self, chain: Chain, slabs: Sequence[Slab]) -> None:
        if chain.readers:
            # Whoever reads has the bytes until he is done; a mover that starts must not find them.
            self._forget(slabs)
            chain.waiting += slabs
        elif slabs:
            self._let_go(slabs)


def _longest(story: Story, by_ordinal: dict[int, list[tuple[Slab, Record]]]) -> tuple[list[Kept], Kept | None]:
    """The blocks of a story from the first one on, as far as each continues the one before it."""
    full: list[Kept] = []
    before = story.root()
    for ordinal in range(len(by_ordinal)):
        fitting = [(r.positions, r.sequence, s, r) for s, r in by_ordinal.get(ordinal, ()) if _fits(before, r)]
        if not fitting:
            break
        positions, _, slab, record = max(fitting, key=lambda item: item[:2])
        owner = record.generation, record.table_generation
        kept = Kept(slab, owner, positions, record.kind, record.sum, record.chain, record.tokens)
        if positions < story.form[1]:
            return full, kept
        full.append(kept)
        before = record.chain
    return full, None


def _newest(by_ordinal: dict[int, list[tuple[Slab, Record]]]) -> tuple[int, int]:
    return max((record.generation, record.sequence) for records in by_ordinal.values() for _, record in records)


def _fits(before: bytes, record: Record) -> bool:
    """Whether a record continues a digest, and has as many outputs as its place says."""
    first = record.ordinal * record.story.form[1]
    outputs = max(0, first + record.positions - max(first, record.story.prompt_len))
    return len(record.tokens) == outputs and linked(before, record.tokens) == record.chain
