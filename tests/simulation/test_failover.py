"""Whole sidecars under seeded schedules of kills, stalls, cut connections and faults of the mover.

At every step: nothing lost, repeated or reordered for any client; no engine computes from KV that is not its session's;
what is called exact is what an undisturbed run says; every session ends once, with one refusal at most; and what died
is let go when nobody needs it.
"""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.sidecar import coordinator
from support.sim_world import World
from support.virtual_time import VirtualLoop

SCHEDULES = 160
AT_ONCE = 40


class _Clock:
    """The coordinator's `time`, on the loop's clock."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(coordinator, "time", _Clock())
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def played(seed: int, folder: Path) -> "Counter[str]":
    """Play one schedule; a failure names its seed."""
    place = folder / str(seed)
    place.mkdir()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(_played(seed, place))
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise


async def _played(seed: int, place: Path) -> "Counter[str]":
    world = World(seed, place)
    await world.run()
    return world.told


@pytest.mark.parametrize("first", range(0, SCHEDULES, AT_ONCE))
def test_no_schedule_breaks_a_promise(first: int, folder: Path) -> None:
    told: Counter[str] = Counter()
    for seed in range(first, first + AT_ONCE):
        told += played(seed, folder)
    # A simulation in which nothing happens proves nothing.
    assert told["kills"] >= AT_ONCE
    assert told["outcome exact"] >= AT_ONCE // 10
    assert told["finished"] >= AT_ONCE
