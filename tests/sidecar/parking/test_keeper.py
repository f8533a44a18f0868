"""A group is parked and brought back through real helpers; whatever goes wrong on the way ends in time and in order."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from midstream.adapters.cuda_checkpoint.driver import ProcessState
from midstream.adapters.cuda_checkpoint.machine import Limits, ParkState
from midstream.session.errors import ParkError
from midstream.sidecar.parking.guests import BareProcess
from midstream.sidecar.parking.journal import Journal
from midstream.sidecar.parking.keeper import Keeper
from midstream.sidecar.processes import read_process
from support.sim_cuda import DRIVER, GPUS, VARIABLE, SimCuda
from support.sim_trainers import GIB, SUPPORT, Trainer, trainers

# Many processes, real ones.
pytestmark = pytest.mark.service

LIMITS = Limits(check_s=10, guest_s=5, lock_s=1, answer_s=0.5, copy_s=3, unlock_s=2, settle_s=0.5, kill_s=5)
NCCL = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
PLENTY = 64 * GIB


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="ms-park-") as name:
        yield Path(name)


@pytest.fixture
def sim(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimCuda]:
    with SimCuda(folder) as made:
        monkeypatch.setenv(VARIABLE, str(made.path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        yield made


@pytest.fixture
def trainer(sim: SimCuda, folder: Path) -> Iterator[Trainer]:
    with trainers(sim, folder) as [made]:
        yield made


@pytest.fixture
def pair(sim: SimCuda, folder: Path) -> Iterator[list[Trainer]]:
    with trainers(sim, folder, 2, more=NCCL) as made:
        yield made


@asynccontextmanager
async def kept(folder: Path, who: Sequence[Trainer], **options: Any) -> AsyncIterator[Keeper]:
    """A keeper of these, with a journal in `folder`."""
    journal = Journal(folder)
    fd = await journal.lock("w", 5)
    more = {"limits": LIMITS, "driver": DRIVER, "free_bytes": PLENTY, "guest": BareProcess()} | options
    guest = more.pop("guest")
    entry = journal.read("w")
    keeper = (
        Keeper("w", [t.process for t in who], guest, journal, fd, **more)
        if entry is None
        else Keeper.of(entry, guest, journal, fd, **more)
    )
    try:
        yield keeper
    finally:
        await keeper.close()
        os.close(fd)


async def undisturbed(*who: Trainer) -> None:
    for trainer in who:
        await asyncio.to_thread(trainer.goes_on)
        trainer.is_undisturbed()


async def ended(*who: Trainer) -> None:
    for trainer in who:
        await asyncio.to_thread(trainer.popen.wait, 5)
        assert trainer.popen.returncode == -signal.SIGKILL


async def test_a_training_loop_is_parked_and_goes_on_as_if_nothing_had_been(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    async with kept(folder, [trainer]) as keeper:
        parked = await keeper.park()
        assert (parked.state, parked.text) == (ParkState.PARKED, "")
        assert sim.free("GPU-0") == sim.total["GPU-0"]
        count = len(trainer.written())
        await asyncio.sleep(0.1)
        assert len(trainer.written()) == count
        entry = Journal(folder).read("w")
        assert entry is not None
        assert entry.state is ParkState.PARKED
        assert entry.ranks[0].gpus == {"GPU-0": 2 * GIB}
        back = await keeper.unpark()
        assert back.state is ParkState.RUNNING
        assert {"locking", "checkpointing"} <= set(parked.seconds)
    await undisturbed(trainer)
    assert Journal(folder).read("w") is None
    assert [op for op, _ in sim.calls] == ["lock", "checkpoint", "restore", "unlock"]


async def test_it_comes_back_on_another_gpu_of_the_kind_with_a_map_that_names_all(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    async with kept(folder, [trainer]) as keeper:
        await keeper.park()
        sim.others["GPU-0"] = sim.total["GPU-0"]
        back = await keeper.unpark({"GPU-0": "GPU-1"})
        assert back.state is ParkState.RUNNING
        assert sim.processes[trainer.pid].held == {"GPU-1": 2 * GIB}
    await undisturbed(trainer)


async def test_a_gpu_that_is_full_is_seen_before_the_restore_and_the_process_stays_parked(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    async with kept(folder, [trainer]) as keeper:
        await keeper.park()
        sim.others["GPU-0"] = sim.total["GPU-0"] - GIB
        refused = await keeper.unpark()
        assert refused.state is ParkState.PARKED
        assert refused.text.startswith("gpu-memory: ")
        assert ("restore", trainer.pid) not in sim.calls
        sim.others.clear()
        assert (await keeper.unpark()).state is ParkState.RUNNING
    await undisturbed(trainer)


async def test_a_kernel_that_does_not_end_refuses_the_lock_and_the_process_goes_on(sim: SimCuda, folder: Path) -> None:
    with trainers(sim, folder, 1, "--long", "0") as [trainer]:
        sim.fail["lock", trainer.pid] = "NOT_READY"
        async with kept(folder, [trainer]) as keeper:
            outcome = await keeper.park()
        assert outcome.state is ParkState.RUNNING
        assert "NOT_READY" in outcome.text
        await undisturbed(trainer)


async def test_one_rank_s_lock_that_fails_unlocks_the_others(sim: SimCuda, folder: Path, pair: list[Trainer]) -> None:
    sim.fail["lock", pair[1].pid] = "NOT_READY"
    async with kept(folder, pair) as keeper:
        outcome = await keeper.park()
    assert outcome.state is ParkState.RUNNING
    assert sim.state(pair[0].pid) is ProcessState.RUNNING
    await undisturbed(*pair)


async def test_a_group_is_locked_as_a_whole_before_any_of_it_is_checkpointed(
    sim: SimCuda, folder: Path, pair: list[Trainer]
) -> None:
    async with kept(folder, pair) as keeper:
        assert (await keeper.park()).state is ParkState.PARKED
        assert (await keeper.unpark()).state is ParkState.RUNNING
    assert [op for op, _ in sim.calls] == [op for op in ("lock", "checkpoint", "restore", "unlock") for _ in pair]
    await undisturbed(*pair)


@pytest.mark.parametrize(("op", "code"), [("checkpoint", "NOT_SUPPORTED"), ("unlock", "UNKNOWN")])
async def test_a_rank_that_fails_ends_the_group(
    sim: SimCuda, folder: Path, pair: list[Trainer], op: str, code: str
) -> None:
    sim.fail[op, pair[1].pid] = code
    async with kept(folder, pair) as keeper:
        outcome = await keeper.park()
        if outcome.state is ParkState.PARKED:
            outcome = await keeper.unpark()
    assert outcome.state is ParkState.GONE
    assert code in outcome.text
    await ended(*pair)
    assert Journal(folder).read("w") is None


async def test_a_process_with_a_mapping_of_another_s_is_refused_twice_and_then_given_up(
    sim: SimCuda, folder: Path
) -> None:
    with trainers(sim, folder, 1, "--ipc") as [trainer]:
        async with kept(folder, [trainer]) as keeper:
            assert (await keeper.park()).state is ParkState.PARKED
            first = await keeper.unpark()
            assert (first.state, "INVALID_VALUE" in first.text) == (ParkState.PARKED, True)
            second = await keeper.unpark()
            assert second.state is ParkState.GONE
        await ended(trainer)


async def test_a_restore_that_runs_out_of_memory_all_the_same_is_the_end_of_it(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    async with kept(folder, [trainer]) as keeper:
        await keeper.park()
        sim.fail["restore", trainer.pid] = "OUT_OF_MEMORY"
        outcome = await keeper.unpark()
    assert outcome.state is ParkState.GONE
    assert "OUT_OF_MEMORY" in outcome.text
    await ended(trainer)


async def killed_helper(sim: SimCuda, keeper: Keeper, op: str, pid: int) -> None:
    await asyncio.to_thread(sim.wait_called, op, pid)
    for helper in list(keeper._helpers.values()):
        os.kill(helper.pid, signal.SIGKILL)


@pytest.mark.parametrize("op", ["lock", "checkpoint", "restore", "unlock"])
async def test_a_helper_that_is_killed_in_a_call_that_comes_to_its_end_costs_nothing(
    sim: SimCuda, folder: Path, trainer: Trainer, op: str
) -> None:
    sim.slow[op] = 0.4
    async with kept(folder, [trainer]) as keeper:
        killing = asyncio.create_task(killed_helper(sim, keeper, op, trainer.pid))
        outcome = await keeper.park()
        if op in ("restore", "unlock"):
            outcome = await keeper.unpark()
        await killing
        # A lock without its helper is not one that a checkpoint is built on.
        wanted = {"lock": ParkState.RUNNING, "checkpoint": ParkState.PARKED}.get(op, ParkState.RUNNING)
        assert outcome.state is wanted, outcome
        if outcome.state is ParkState.PARKED:
            assert (await keeper.unpark()).state is ParkState.RUNNING
    await undisturbed(trainer)


@pytest.mark.parametrize("op", ["lock", "checkpoint", "restore", "unlock"])
async def test_a_call_that_hangs_ends_with_its_deadline(sim: SimCuda, folder: Path, trainer: Trainer, op: str) -> None:
    sim.stuck.add((op, trainer.pid))
    limits = Limits(check_s=5, guest_s=5, lock_s=0.3, answer_s=0.3, copy_s=0.8, unlock_s=0.8, settle_s=0.3, kill_s=5)
    async with kept(folder, [trainer], limits=limits) as keeper:
        began_s = time.monotonic()
        outcome = await keeper.park()
        if outcome.state is ParkState.PARKED:
            outcome = await keeper.unpark()
        assert time.monotonic() - began_s < 12
        # What the driver still calls locked or checkpointed is as it was; it is brought back, or stays parked.
        wanted = {"lock": ParkState.RUNNING, "checkpoint": ParkState.RUNNING, "restore": ParkState.PARKED}
        assert outcome.state is wanted.get(op, ParkState.GONE), outcome
        sim.stuck.clear()
        if outcome.state is ParkState.PARKED:
            outcome = await keeper.unpark()
        if outcome.state is not ParkState.GONE:
            await undisturbed(trainer)
        else:
            await ended(trainer)


async def test_a_rank_that_dies_in_the_midst_ends_the_group_at_once(
    sim: SimCuda, folder: Path, pair: list[Trainer]
) -> None:
    sim.slow["checkpoint"] = 2.0
    async with kept(folder, pair) as keeper:
        parking = asyncio.create_task(keeper.park())
        await asyncio.to_thread(sim.wait_called, "checkpoint", pair[0].pid)
        pair[1].popen.kill()
        outcome = await asyncio.wait_for(parking, 2)
    assert outcome.state is ParkState.GONE
    await ended(*pair)


async def test_a_parked_process_that_is_killed_is_noticed(sim: SimCuda, folder: Path, trainer: Trainer) -> None:
    states: list[ParkState] = []
    async with kept(folder, [trainer], on_state=lambda state, _: states.append(state)) as keeper:
        await keeper.park()
        trainer.popen.kill()
        for _ in range(200):
            if keeper.state is ParkState.GONE:
                break
            await asyncio.sleep(0.01)
        assert keeper.state is ParkState.GONE
    assert states[-2:] == [ParkState.LOST, ParkState.GONE]
    assert Journal(folder).read("w") is None


class Stubborn(BareProcess):
    """A guest whose answer has become another, or that cannot be brought to stand still."""

    def __init__(self, *, quiet: bool = True) -> None:
        super().__init__()
        self._quiet = quiet
        self.woken = 0

    async def quiesce(self) -> None:
        if not self._quiet:
            raise ParkError("sessions: it has some, and nobody else takes them")

    async def save(self) -> Mapping[str, Any]:
        return {"answer": [1, 2, 3]}

    async def wake(self) -> None:
        self.woken += 1

    async def prove(self, known: Mapping[str, Any]) -> None:
        raise ParkError(f"it answers otherwise than {known['answer']}")


async def test_a_guest_that_cannot_stand_still_is_not_parked(sim: SimCuda, folder: Path, trainer: Trainer) -> None:
    guest = Stubborn(quiet=False)
    async with kept(folder, [trainer], guest=guest) as keeper:
        outcome = await keeper.park()
    assert (outcome.state, guest.woken, sim.calls) == (ParkState.RUNNING, 1, [])
    assert outcome.text.startswith("sessions: ")
    await undisturbed(trainer)


async def test_a_guest_that_is_not_what_it_was_takes_no_part_again(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    async with kept(folder, [trainer], guest=Stubborn()) as keeper:
        assert (await keeper.park()).state is ParkState.PARKED
        outcome = await keeper.unpark()
    assert outcome.state is ParkState.GONE
    assert "otherwise than [1, 2, 3]" in outcome.text
    await ended(trainer)


async def test_a_park_that_is_cancelled_leaves_the_process_running(
    sim: SimCuda, folder: Path, trainer: Trainer
) -> None:
    sim.slow["lock"] = 0.5
    async with kept(folder, [trainer]) as keeper:
        parking = asyncio.create_task(keeper.park())
        await asyncio.to_thread(sim.wait_called, "lock", trainer.pid)
        keeper.cancel()
        outcome = await parking
    assert (outcome.state, outcome.text) == (ParkState.RUNNING, "the park was cancelled")
    assert read_process(trainer.pid) is not None
    await undisturbed(trainer)


async def test_what_a_process_had_is_measured_where_the_driver_does_not_tell(
    sim: SimCuda, folder: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.sidecar.parking.keeper.rank_of", _untold)
    async with kept(folder, [trainer]) as keeper:
        await keeper.park()
        assert keeper.entry.ranks[0].gpus == {GPUS[0]: 2 * GIB}
        monkeypatch.undo()
    trainer.popen.kill()


def _untold(pid: int, look: Mapping[str, Any]) -> Any:
    from midstream.sidecar.parking.facts import rank_of

    return rank_of(pid, {**look, "held": {}})
