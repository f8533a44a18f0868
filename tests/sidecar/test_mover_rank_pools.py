"""The pools of several ranks as one: a block is compared, copied and stored in all of them or in none."""

import os
import random
from collections.abc import Sequence

import pytest

from midstream.session.errors import PoolError
from midstream.session.held import create_host_pool
from midstream.session.layout import Plane, PoolLayout, PoolMeta
from midstream.sidecar.mover.host_pool import HostPool, open_host_pool
from midstream.sidecar.mover.pools import BlockDamaged, Copied, Copies, Pool
from midstream.sidecar.mover.rank_pools import RankPools

BLOCK_TOKENS = 4
# A rank of a later stage may have other layers, and so another size of block.
SIZES = ((64, 64), (64, 32, 32, 8))


def host_pool(name: str, sizes: Sequence[int], count: int = 16, seed: int | None = None) -> HostPool:
    """A pool of `count` blocks with planes of these sizes; with a seed something lies in it."""
    planes, offset = [], 0
    for size in sizes:
        planes.append(Plane(offset, size, size))
        offset += size * count
    layout = PoolLayout(count, BLOCK_TOKENS, tuple(planes))
    fd = create_host_pool(layout.end)
    try:
        pool = open_host_pool(name, fd, PoolMeta(layout.end, layout, layout.fingerprint(), {}))
    finally:
        os.close(fd)
    if seed is not None:
        pool.view[: layout.end] = random.Random(seed).randbytes(layout.end)
    return pool


def block(pool: HostPool, number: int) -> bytes:
    return b"".join(pool.view[start:end] for start, end in pool.layout.spans(number))


@pytest.fixture
def old() -> list[HostPool]:
    return [host_pool(f"old/1/{rank}", sizes, seed=rank) for rank, sizes in enumerate(SIZES)]


@pytest.fixture
def new() -> list[HostPool]:
    return [host_pool(f"new/1/{rank}", sizes, count=12 + rank) for rank, sizes in enumerate(SIZES)]


def test_a_block_is_made_up_of_the_parts_of_all_ranks(old: list[HostPool], new: list[HostPool]) -> None:
    ours, theirs = RankPools(old), RankPools(new)
    assert (ours.name, ours.memory, ours.rank_count, ours.gpus) == ("old/1/0+old/1/1", "host", 2, frozenset())
    assert ours.form == (ours.fingerprint, BLOCK_TOKENS, 128 + 136)
    assert ours.form == theirs.form
    assert (ours.layout.block_count, theirs.layout.block_count) == (16, 12)
    # In another order, or of fewer ranks, it is another block.
    assert len({ours.fingerprint, RankPools(old[::-1]).fingerprint, RankPools(old[:1]).fingerprint}) == 3


def test_a_sum_speaks_of_every_rank(old: list[HostPool]) -> None:
    ours = RankPools(old)
    before = ours.sum_blocks([3, 5, 3])
    assert before[0] == before[2] != before[1]
    for pool in old:
        for start, end in pool.layout.spans(5):
            pool.view[end - 1] ^= 1
            after = ours.sum_blocks([3, 5])
            assert (after[0], after[1] == before[1]) == (before[0], False)
            pool.view[end - 1] ^= 1
            assert ours.sum_blocks([5]) == [before[1]], start
    # What one rank has in one block is not what another has there.
    assert RankPools(old[::-1]).sum_blocks([3]) != [before[0]]


def test_several_sessions_are_copied_in_all_ranks_and_a_damaged_one_in_none(
    old: list[HostPool], new: list[HostPool]
) -> None:
    ours, theirs = RankPools(old), RankPools(new)
    sums = ours.sum_blocks(range(16))
    works = [Copies(0, [1, 2, 3], [9, 8, 7], sums[1:3]), Copies(4, [5, 6], [1, 2], sums[5:7])]
    old[1].view[old[1].layout.spans(6)[2][0]] ^= 1
    begun: list[int] = []
    found = ours.copy_all(theirs, works, lambda: begun.append(1))
    assert found == [Copied(3 * 264, 2, 1), Copied(0, 1, 0, 5)]
    assert begun
    for mine, other in zip(old, new, strict=True):
        assert [block(other, n) for n in (9, 8, 7)] == [block(mine, n) for n in (1, 2, 3)]
        assert not any(block(other, 1) + block(other, 2))


def test_where_every_session_is_damaged_those_who_wait_for_the_start_are_told_all_the_same(
    old: list[HostPool], new: list[HostPool]
) -> None:
    begun: list[int] = []
    [found] = RankPools(old).copy_all(RankPools(new), [Copies(0, [1], [1], [0])], lambda: begun.append(1))
    assert (found.damaged, len(begun)) == (0, 1)


def test_in_the_same_memory_what_stays_is_only_compared(old: list[HostPool]) -> None:
    ours = RankPools(old)
    moved = [block(pool, 2) for pool in old]
    found = ours.copy_to(RankPools(old), Copies(0, [1, 2], [1, 9], ours.sum_blocks([1, 2])))
    assert found == Copied(264, 2, 0)
    assert [block(pool, 9) for pool in old] == moved


def test_blocks_go_to_disk_and_back_with_all_their_parts(old: list[HostPool], new: list[HostPool]) -> None:
    ours, theirs = RankPools(old), RankPools(new)
    raws = list(ours.gather([4, 2], ours.sum_blocks([4])))
    assert raws == [b"".join(block(pool, n) for pool in old) for n in (4, 2)]
    theirs.scatter(raws, [0, 11])
    for mine, other in zip(old, new, strict=True):
        assert [block(other, 0), block(other, 11)] == [block(mine, 4), block(mine, 2)]
    with pytest.raises(PoolError, match="264 bytes"):
        theirs.scatter([raws[0][:-1]], [0])


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_of_a_damaged_block_is_given_out(old: list[HostPool], rank: int) -> None:
    ours = RankPools(old)
    sums = ours.sum_blocks([4, 2, 7])
    old[rank].view[old[rank].layout.spans(2)[1][0]] ^= 1
    given = ours.gather([4, 2, 7, 8], sums)
    assert next(given) == b"".join(block(pool, 4) for pool in old)
    with pytest.raises(BlockDamaged) as caught:
        next(given)
    assert caught.value.index == 1


def test_unlike_groups_never_take_each_others_blocks(old: list[HostPool], new: list[HostPool]) -> None:
    ours, work = RankPools(old), Copies(0, [1], [1], [])
    three = RankPools([*new, host_pool("new/1/2", SIZES[0])])
    half = RankPools([new[0], old[1]])
    others: list[tuple[Pool, str]] = [(new[0], "unlike ranks"), (three, "unlike ranks"), (half, "some ranks only")]
    for other, text in others:
        with pytest.raises(PoolError, match=text):
            ours.copy_to(other, work)
    assert not any(block(new[0], 1))


def test_ranks_that_are_no_group_are_refused(old: list[HostPool]) -> None:
    with pytest.raises(PoolError, match="the same memory"):
        RankPools([old[0], old[0]])
    layout = PoolLayout(4, 2 * BLOCK_TOKENS, (Plane(0, 64, 64),))
    fd = create_host_pool(layout.end)
    other = open_host_pool("other", fd, PoolMeta(layout.end, layout, layout.fingerprint(), {}))
    os.close(fd)
    with pytest.raises(PoolError, match="different kinds"):
        RankPools([old[0], other])


def test_a_rank_that_fails_fails_the_call_when_all_are_over(old: list[HostPool], new: list[HostPool]) -> None:
    with pytest.raises(PoolError, match="block 12 is not in a pool of 12"):
        RankPools(new).sum_blocks([12])
    with pytest.raises(PoolError, match="block 12"):
        RankPools(old).copy_to(RankPools(new), Copies(0, [1], [12], []))
