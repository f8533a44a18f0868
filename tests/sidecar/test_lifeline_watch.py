"""The thread that waits for lifelines: every death once, at once, and nothing of what was let go of."""

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from midstream.session import futex
from midstream.session.errors import LifelineError
from midstream.session.lifeline import Hold, Holder, LifelineFile, create_lifeline
from midstream.sidecar import lifeline_watch
from midstream.sidecar.lifeline_watch import LifelineWatch, Watched
from support.lifelines import PidfdClock, all_ended, ended

# The next look, where it must not be what finds a death; and how late one that is told at once may be.
FAR_S, SOON_S = 2.0, 0.1
TRIES = 5
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    with all_ended() as starting:
        yield starting


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_lifeline(tmp_path / "1.lifeline")
    return tmp_path / "1.lifeline"


@pytest.fixture(params=[True, False], ids=["waits", "polls"])
def watch(request: pytest.FixtureRequest) -> Iterator[LifelineWatch]:
    watching = LifelineWatch(can_wait=request.param)
    yield watching
    watching.close()
    assert watching._thread is None or not watching._thread.is_alive()


def maps() -> str:
    return Path("/proc/self/maps").read_text()


async def until(condition: Callable[[], bool], within_s: float = 10) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


async def held(path: Path, count: int = 1) -> None:
    file = LifelineFile(path)
    await until(lambda: [hold for hold, _, _ in file.look()] == [Hold.HELD] * count)
    file.close()


async def told_late_s(
    popen: "subprocess.Popen[str]", told: dict[int, float], watch: LifelineWatch, monkeypatch: pytest.MonkeyPatch
) -> float:
    """How much later than by its pidfd a process's death is told, where no look is near that would find it."""
    every_s = lifeline_watch.LOOK_EVERY_S
    await asyncio.sleep(2 * every_s)
    with monkeypatch.context() as far:
        far.setattr(lifeline_watch, "LOOK_EVERY_S", FAR_S)
        # The wait that has begun already is a short one.
        await asyncio.sleep(2 * every_s)
        gone = asyncio.create_task(asyncio.to_thread(PidfdClock(popen.pid).gone_at))
        await asyncio.sleep(0.01)
        popen.kill()
        await until(lambda: popen.pid in told)
    watch._ring()
    late_s = told[popen.pid] - await gone
    print(f"told {1000 * late_s:.2f} ms after the pidfd")
    return late_s


async def is_told_soon(attempt: Callable[[int], Awaitable[float]]) -> bool:
    """Whether one of a few deaths is told at once: others may want the processor just then, but not each time."""
    for number in range(TRIES):
        if await attempt(number) < SOON_S:
            return True
    return False


async def test_a_death_is_told_once(path: Path, start: Start, watch: LifelineWatch) -> None:
    popen = start(path)
    await held(path)
    told: list[Holder] = []
    watch.add(path, told.append)
    await asyncio.sleep(2 * lifeline_watch.LOOK_EVERY_S)
    assert told == []
    popen.kill()
    await until(lambda: bool(told))
    assert (told[0].name, told[0].pid) == ("core", popen.pid)
    await asyncio.sleep(2 * lifeline_watch.LOOK_EVERY_S)
    assert len(told) == 1


async def test_a_death_is_told_at_once_and_not_at_the_next_look(
    path: Path, start: Start, watch: LifelineWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, float] = {}
    # One that lives, so that there is always something to wait for.
    start(path)
    await held(path)
    watch.add(path, lambda holder: None)

    async def attempt(number: int) -> float:
        file = path.with_name(f"at-once-{number}.lifeline")
        create_lifeline(file)
        popen = start(file)
        await held(file)
        watch.add(file, lambda holder: told.setdefault(holder.pid, time.perf_counter()))
        return await told_late_s(popen, told, watch, monkeypatch)

    assert await is_told_soon(attempt)


async def test_a_process_that_died_before_it_was_watched_is_told(
    path: Path, start: Start, watch: LifelineWatch
) -> None:
    popen = start(path)
    await held(path)
    ended(popen)
    told: list[Holder] = []
    watch.add(path, told.append)
    await until(lambda: bool(told))
    assert told[0].pid == popen.pid


async def test_a_cell_that_is_taken_later_is_watched_too(
    path: Path, start: Start, watch: LifelineWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, float] = {}
    watch.add(path, lambda holder: told.setdefault(holder.pid, time.perf_counter()))
    await asyncio.sleep(0.05)
    start(path)
    await held(path)

    async def attempt(number: int) -> float:
        return await told_late_s(start(path), told, watch, monkeypatch)

    assert await is_told_soon(attempt)


async def test_a_file_that_nobody_holds_says_nothing(path: Path, watch: LifelineWatch) -> None:
    told: list[Holder] = []
    watch.add(path, told.append)
    await asyncio.sleep(2 * lifeline_watch.LOOK_EVERY_S)
    assert told == []


async def test_nothing_is_told_of_a_file_that_was_let_go_of(path: Path, start: Start, watch: LifelineWatch) -> None:
    popen = start(path)
    await held(path)
    told: list[Holder] = []
    watched = watch.add(path, told.append)
    watched.close()
    popen.kill()
    await asyncio.sleep(2 * lifeline_watch.LOOK_EVERY_S)
    assert told == []
    await until(lambda: watch._watched == [])
    assert str(path) not in maps()


async def test_a_death_that_waits_to_be_told_is_not_told_after_its_file_was_let_go_of(
    path: Path, start: Start, watch: LifelineWatch
) -> None:
    popen = start(path)
    await held(path)
    told: list[Holder] = []
    watched = watch.add(path, told.append)
    ended(popen)
    # The thread sees it meanwhile, and this loop does not run.
    time.sleep(2 * lifeline_watch.LOOK_EVERY_S)  # noqa: ASYNC251
    watched.close()
    await asyncio.sleep(0.05)
    assert told == []


async def test_many_files_of_many_processes_are_watched_at_once(
    tmp_path: Path, start: Start, watch: LifelineWatch
) -> None:
    told: list[tuple[int, int]] = []
    processes = []
    for number in range(3):
        path = tmp_path / f"{number}.lifeline"
        create_lifeline(path)
        processes.append([start(path), start(path)])
        watch.add(path, lambda holder, number=number: told.append((number, holder.pid)))  # type: ignore[misc]
        await held(path, 2)
    await asyncio.sleep(2 * lifeline_watch.LOOK_EVERY_S)
    processes[1][0].kill()
    await until(lambda: told == [(1, processes[1][0].pid)])
    for first, second in processes:
        first.kill()
        second.kill()
    await until(lambda: len(told) == 6)
    assert set(told) == {(number, popen.pid) for number, pair in enumerate(processes) for popen in pair}


async def test_more_words_than_one_wait_takes_are_looked_at_instead(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futex, "WAIT_MAX", 1)
    watch = LifelineWatch()
    popen = start(path)
    await held(path)
    told: list[Holder] = []
    watch.add(path, told.append)
    popen.kill()
    await until(lambda: bool(told))
    watch.close()


async def test_where_the_kernel_refuses_to_wait_deaths_are_told_all_the_same(
    path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(words: object, within_s: float) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(futex, "wait_any", refuses)
    watch = LifelineWatch()
    popen = start(path)
    await held(path)
    told: list[Holder] = []
    watch.add(path, told.append)
    popen.kill()
    await until(lambda: bool(told))
    assert not watch._can_wait
    watch.close()


async def test_a_file_that_is_none_is_an_error_and_the_others_go_on(
    path: Path, start: Start, watch: LifelineWatch, tmp_path: Path
) -> None:
    told: list[Holder] = []
    watch.add(path, told.append)
    with pytest.raises(LifelineError, match="pidfds alone"):
        watch.add(tmp_path / "none", told.append)
    popen = start(path)
    await held(path)
    ended(popen)
    await until(lambda: bool(told))


async def test_waiting_costs_next_to_nothing(
    path: Path, start: Start, watch: LifelineWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = Watched.look

    def counted(watched: Watched) -> list[tuple[int, int]]:
        nonlocal looks
        looks += 1
        return look(watched)

    monkeypatch.setattr(Watched, "look", counted)
    start(path)
    await held(path)
    watch.add(path, lambda holder: None)
    assert watch._thread is not None
    assert watch._thread.ident is not None
    processor = time.pthread_getcpuclockid(watch._thread.ident)
    await asyncio.sleep(0.3)
    every_s = lifeline_watch.LOOK_EVERY_S if watch._can_wait else lifeline_watch.POLL_S
    shares = []
    # Its looks can be counted, whoever else runs; what they cost depends a little on that.
    for _ in range(TRIES):
        looks_before, began_s, before_s = looks, time.monotonic(), time.clock_gettime(processor)
        await asyncio.sleep(1)
        took_s = time.monotonic() - began_s
        assert looks - looks_before <= took_s / every_s + 2
        shares.append((time.clock_gettime(processor) - before_s) / took_s)
        if shares[-1] < 0.1:
            break
    print(f"shares of a processor: {shares}")
    assert min(shares) < 0.1
