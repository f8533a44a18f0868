"""The tier-1 area and its index: whatever is read back after a crash is a beginning of what was kept."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.session.ids import SessionId
from midstream.sidecar.mover.memory_area import MemoryArea, Slab
from midstream.sidecar.mover.memory_index import Chain, Kept, MemoryIndex
from midstream.sidecar.mover.memory_records import (
    EXTENT_HEADER_BYTES,
    HEADER_BYTES,
    Form,
    Record,
    Story,
    decode_record,
    encode_record,
    linked,
    record_bytes,
)
from midstream.sidecar.mover.pools import SumKind

FORM: Form = ("ab" * 16, 4, 3000)
OTHER: Form = ("cd" * 16, 8, 9000)
EXTENT = 64 << 10


def story(number: int, form: Form = FORM, prompt_len: int = 5) -> Story:
    return Story(SessionId(f"{number:032x}"), form, 1, "9" * 32, prompt_len, "7" * 32)


class Kit:
    """An area with its index, which enter blocks as the tier does."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.area = MemoryArea(memoryview(memory))
        self.index = MemoryIndex(self.area.forget, self.area.give)
        self.index.take_over(self.area.found, 0.0)
        self.sequence = 0

    def add(self, chain: Chain, tokens: list[int], positions: int = 0) -> bool:
        form = chain.story.form
        taken = self.area.take(form, 1)
        if not taken:
            return False
        self.sequence += 1
        ordinal, [slab] = len(chain.full), taken
        digest = linked(chain.before(ordinal), tokens)
        kept = Kept(slab, (1, 1), positions or form[1], SumKind.XXH3, self.sequence, digest, tuple(tokens))
        record = Record(
            chain.story, 1, 1, ordinal, self.sequence, kept.positions, kept.kind, kept.sum, digest, kept.tokens
        )
        self.area.write(slab, record)
        (self.index.set_tail if positions else self.index.add)(chain, kept)
        return True

    def told(self) -> dict[Story, list[Kept]]:
        return {chain.story: chain.blocks for chain in self.index.chains if chain.blocks}


def block_tokens(ordinal: int, form: Form = FORM, prompt_len: int = 5, positions: int = 0) -> list[int]:
    """What a block, or its first positions, hold of the outputs 100, 101, ..."""
    first = ordinal * form[1]
    end = first + (positions or form[1])
    return list(range(100 + max(0, first - prompt_len), 100 + max(0, end - prompt_len)))


def filled() -> tuple[Kit, Chain]:
    kit = Kit(bytearray(HEADER_BYTES + 2 * EXTENT))
    chain = kit.index.begin(story(1), 1)
    for ordinal in range(4):
        kit.add(chain, block_tokens(ordinal))
    kit.add(chain, block_tokens(4)[:2], 2)
    return kit, chain


def test_every_byte_of_header_and_records_that_falls_over_costs_blocks_and_nothing_else() -> None:
    kit, chain = filled()
    before = chain.blocks
    size = record_bytes(FORM[1])
    places = [*range(44), *range(HEADER_BYTES, HEADER_BYTES + EXTENT_HEADER_BYTES + 6 * size)]
    lengths = set()
    for place in places:
        memory = bytearray(kit.memory)
        memory[place] ^= 1 << (place % 8)
        again = Kit(memory)
        found = again.told().get(chain.story, [])
        assert found == before[: len(found)]
        assert Kit(memory).area.torn == 0, "what was torn is cleared"
        # Nothing is in use that is of no chain.
        assert again.area.slabs_used == len(found)
        lengths.add(len(found))
    assert lengths == {0, 1, 2, 3, 4, 5}


def test_an_area_that_was_cut_off_anywhere_while_it_was_written_is_read_as_what_was_whole() -> None:
    kit, chain = filled()
    before = chain.blocks
    for ordinal in range(5):
        memory = bytearray(kit.memory)
        size = record_bytes(FORM[1])
        at = HEADER_BYTES + EXTENT_HEADER_BYTES + before[ordinal].slab.index * size
        for cut in (0, 3, 4, 50, size - 1):
            memory[at + cut : at + size] = bytes(size - cut)
            if memory == kit.memory:
                continue
            found = Kit(bytearray(memory)).told().get(chain.story, [])
            assert found == before[:ordinal]
            memory[at : at + size] = kit.memory[at : at + size]


def test_of_two_tails_the_longer_one_counts_and_of_two_full_blocks_the_newer_one() -> None:
    kit, chain = filled()
    [spare, other] = kit.area.take(FORM, 2)
    # As if the mover had been killed between the new record and the clearing of the old one.
    tail = chain.tail
    assert tail is not None
    longer = block_tokens(4)[:3]
    kit.area.write(
        spare, Record(chain.story, 1, 1, 4, 99, 3, SumKind.XXH3, 1, linked(chain.before(4), longer), tuple(longer))
    )
    full = chain.full[3]
    kit.area.write(other, Record(chain.story, 2, 1, 3, 98, 4, full.kind, 5, full.chain, full.tokens))
    again = Kit(bytearray(kit.memory))
    [found] = again.index.chains
    assert (found.kv_len, found.full[3].sum, found.full[3].owner, found.generation) == (19, 5, (2, 1), 2)
    assert again.area.slabs_used == 5


def test_blocks_of_another_session_key_or_prompt_are_no_part_of_a_chain() -> None:
    kit, chain = filled()
    own = chain.full[1]
    for wrong in (
        replace(chain.story, session=SessionId("2" * 32)),
        replace(chain.story, key="8" * 32),
        replace(chain.story, prompt_hash="6" * 32),
        replace(chain.story, prompt_len=4),
        replace(chain.story, ranks=2),
    ):
        memory = bytearray(kit.memory)
        area = MemoryArea(memoryview(memory))
        area.give([own.slab])
        [slab] = area.take(FORM, 1)
        tokens = tuple(block_tokens(1, prompt_len=wrong.prompt_len))
        area.write(slab, Record(wrong, 1, 1, 1, 50, 4, own.kind, own.sum, own.chain, tokens))
        again = Kit(memory)
        assert again.told() == {chain.story: chain.full[:1]}


def test_a_block_that_continues_other_tokens_is_no_part_of_a_chain() -> None:
    kit, chain = filled()
    other = [7, 8, 9, 10]
    for tokens, digest in (
        # Of the same session, after a block that held something else; and with other tokens than it says.
        (tuple(block_tokens(3)), linked(linked(chain.before(2), other), block_tokens(3))),
        ((7, 8, 9, 10), chain.full[3].chain),
        (tuple(block_tokens(3)[:3]), linked(chain.before(3), block_tokens(3)[:3])),
    ):
        memory = bytearray(kit.memory)
        area = MemoryArea(memoryview(memory))
        slab = chain.full[3].slab
        area.write(slab, Record(chain.story, 1, 1, 3, 50, 4, SumKind.XXH3, 1, digest, tokens))
        assert Kit(memory).told() == {chain.story: chain.full[:3]}


@pytest.mark.parametrize("positions", [0, 5])
def test_a_record_that_contradicts_itself_is_none(positions: int) -> None:
    record = Record(story(1), 1, 1, 3, 9, positions, SumKind.XXH3, 1, b"c" * 16, ())
    assert decode_record(encode_record(record), FORM) is None
    assert decode_record(encode_record(replace(record, positions=4)), FORM) is not None
    assert decode_record(encode_record(replace(record, positions=2, tokens=(1, 2, 3))), FORM) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30))
def test_whatever_is_done_no_slab_has_two_owners_and_a_new_mover_finds_the_same(seed: int) -> None:
    chance = random.Random(seed)
    kit = Kit(bytearray(HEADER_BYTES + chance.choice([1, 2, 5]) * EXTENT))
    read: list[Chain] = []
    for _ in range(300):
        number = chance.randrange(8)
        form = FORM if number % 2 else OTHER
        match chance.randrange(10):
            case 0:
                if (chain := kit.index.get(story(number).session)) is not None:
                    kit.index.drop(chain)
            case 1:
                if (chain := kit.index.get(story(number).session)) is not None:
                    kit.index.cut(chain, chance.randint(0, len(chain.full)))
            case 2:
                if (chain := kit.index.get(story(number).session)) is not None:
                    kit.index.read(chain)
                    read.append(chain)
            case 3:
                if read:
                    kit.index.have_read(read.pop(chance.randrange(len(read))))
            case 4:
                chain = kit.index.begin(story(number, form), 1)
                kit.add(chain, block_tokens(len(chain.full), form, positions=2), 2)
            case _:
                chain = kit.index.begin(story(number, form), 1)
                kit.add(chain, block_tokens(len(chain.full), form))
        _require_whole(kit, read)
    # What is read still is found by nobody.
    assert Kit(bytearray(kit.memory)).told() == kit.told()
    while read:
        kit.index.have_read(read.pop())
    again = Kit(bytearray(kit.memory))
    assert again.told() == kit.told()
    assert again.area.slabs_used == kit.area.slabs_used == sum(len(c.blocks) for c in kit.index.chains)


def _require_whole(kit: Kit, read: list[Chain]) -> None:
    chains = {id(chain): chain for chain in (*kit.index.chains, *read)}.values()
    slabs: list[Slab] = [kept.slab for chain in chains for kept in chain.blocks]
    slabs += [slab for chain in chains for slab in chain.waiting]
    assert len(set(slabs)) == len(slabs) == kit.area.slabs_used
    places = sorted((kit.area.offset(slab), kit.area.offset(slab) + size(kit, slab)) for slab in slabs)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert not places or places[-1][1] <= len(kit.memory)


def size(kit: Kit, slab: Slab) -> int:
    extent = kit.area._extents[slab.extent]
    assert extent is not None
    return extent.form[2]
