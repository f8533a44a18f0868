"""What is made of the mover's answers, and of its silence, where KV lies in host memory and where it lies on a GPU."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.sidecar import kv_restores
from midstream.sidecar.choice import Tier
from midstream.sidecar.kv_restores import KvRestores
from midstream.sidecar.mover.protocol import MoverError, Reason, RestoreResult, VerifyResult
from midstream.sidecar.session_record import Record
from midstream.sidecar.workers import Epoch
from support.coordinating import FakeMover, Rig, S, asked

GPU_KEY = {name: name for name in REQUIRED} | {"cuda_runtime": "13.0"}
SILENT = (Reason.UNREACHABLE, Reason.DEADLINE)


class Telling(FakeMover):
    """Answers in turn, the last answer for ever: None is a good one. `asked` counts."""

    def __init__(self, *answers: Reason | None) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked = 0

    def _answer(self) -> None:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is not None:
            raise MoverError(answer, "as it is told")

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        self._answer()
        return VerifyResult(1000, 0, 0, 10, 0)

    async def sound(self, arena: Path) -> None:
        self._answer()


class Restoring(Telling):
    """Answers restores so, too; `left_s` is the time that each was given."""

    def __init__(self, *answers: Reason | None) -> None:
        super().__init__(*answers)
        self.left_s: list[float] = []

    async def restore(self, session: SessionId, **asked: Any) -> RestoreResult:
        self.left_s.append(asked["deadline_s"])
        self._answer()
        return RestoreResult(True, 8, seconds=0.1)


class Hanging(Telling):
    """Never answers."""

    async def verify(self, arena: Path, session: SessionId, generation: int) -> VerifyResult:
        await asyncio.Event().wait()
        raise AssertionError

    async def sound(self, arena: Path) -> None:
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_restores, "ASK_AGAIN_S", 0.01)


# What is only reached where nothing comes, and what never is, however slow this machine is.
SHORT_S, LONG_S = 0.1, 60.0


async def of(
    folder: Path, mover: FakeMover, *, gpu: bool, load_timeout_s: float = SHORT_S
) -> tuple[KvRestores, Record]:
    """A session whose worker has died, as restores see it."""
    rig = Rig(folder)
    engine = rig.start("w0", key=GPU_KEY if gpu else None)
    placement = await rig.coordinator.admit(asked())
    engine.admit(placement, 1, 2)
    record = rig.coordinator._records[S]
    return KvRestores(mover, rig.metrics, stores=False, load_timeout_s=load_timeout_s), record


@pytest.mark.parametrize("silent", SILENT)
async def test_in_host_memory_a_silent_mover_is_asked_once_and_its_silence_means_nothing(
    tmp_path: Path, silent: Reason
) -> None:
    mover = Telling(silent)
    kv, record = await of(tmp_path, mover, gpu=False)
    assert await kv.verified(record)
    assert mover.asked == 1
    assert await kv.untouched(record)
    assert mover.asked == 1


@pytest.mark.parametrize("silent", SILENT)
@pytest.mark.parametrize("what", [KvRestores.verified, KvRestores.untouched])
async def test_on_a_gpu_a_mover_that_is_started_again_is_asked_again(
    tmp_path: Path, silent: Reason, what: Callable[..., object]
) -> None:
    for last, wanted in ((None, True), (Reason.FAULT, False)):
        mover = Telling(silent, silent, last)
        folder = tmp_path / str(wanted)
        folder.mkdir()
        kv, record = await of(folder, mover, gpu=True, load_timeout_s=LONG_S)
        answer = what(kv, record)
        assert asyncio.iscoroutine(answer)
        assert await answer is wanted
        assert mover.asked == 3


@pytest.mark.parametrize("mover", [Telling(Reason.UNREACHABLE), Telling(Reason.DEADLINE), Hanging()])
async def test_on_a_gpu_what_no_mover_vouches_for_in_time_is_not_used(tmp_path: Path, mover: Telling) -> None:
    kv, record = await of(tmp_path, mover, gpu=True)
    began = time.monotonic()
    assert not await kv.verified(record)
    assert not await kv.untouched(record)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("waiting", [Reason.UNREACHABLE, Reason.BUSY])
async def test_a_mover_that_cannot_restore_yet_is_asked_again_for_what_is_left_of_the_time(
    tmp_path: Path, waiting: Reason
) -> None:
    mover = Restoring(waiting, waiting, None)
    kv, record = await of(tmp_path, mover, gpu=False, load_timeout_s=LONG_S)
    assert (await kv.restore(record, Tier.HELD)).ok
    assert len(mover.left_s) == 3
    # Each time less of it is left, and what the asking took is not given away twice.
    assert mover.left_s == sorted(mover.left_s, reverse=True)
    assert mover.left_s[0] == LONG_S
    assert mover.left_s[2] < LONG_S - 2 * kv_restores.ASK_AGAIN_S
    assert b"midstream_restore_refused_total{" not in kv._metrics.render()


async def test_a_mover_that_is_busy_all_the_time_is_not_waited_for_longer_than_the_engine_waits(tmp_path: Path) -> None:
    mover = Restoring(Reason.BUSY)
    kv, record = await of(tmp_path, mover, gpu=False)
    began = time.monotonic()
    result = await kv.restore(record, Tier.HELD)
    assert (result.ok, result.reason) == (False, "busy")
    assert time.monotonic() - began < 10.0
    assert min(mover.left_s) > 0
    assert 'midstream_restore_refused_total{reason="busy"} 1.0' in kv._metrics.render().decode()


@pytest.mark.parametrize("reason", [Reason.CHECKSUM, Reason.DEADLINE, Reason.GONE])
async def test_a_restore_that_was_begun_and_failed_is_not_asked_for_again(tmp_path: Path, reason: Reason) -> None:
    mover = Restoring(reason, None)
    kv, record = await of(tmp_path, mover, gpu=False, load_timeout_s=LONG_S)
    assert (await kv.restore(record, Tier.HELD)).reason == reason.value
    assert mover.asked == 1


async def test_a_fault_is_told_once_and_counted(tmp_path: Path) -> None:
    mover = Telling(Reason.FAULT)
    kv, record = await of(tmp_path, mover, gpu=True)
    assert not await kv.untouched(record)
    assert mover.asked == 1
    assert not await kv.verified(record)
    assert mover.asked == 2
    assert 'midstream_restore_refused_total{reason="fault"} 1.0' in kv._metrics.render().decode()


@pytest.mark.parametrize("reason", [Reason.ARENA, Reason.POOL, Reason.REQUEST, Reason.INTERNAL])
async def test_what_else_is_wrong_is_the_restores_to_say(tmp_path: Path, reason: Reason) -> None:
    kv, record = await of(tmp_path, Telling(reason), gpu=True)
    assert await kv.untouched(record)


async def test_a_session_without_an_arena_has_nothing_to_ask_for(tmp_path: Path) -> None:
    mover = Telling(None)
    kv, record = await of(tmp_path, mover, gpu=True)
    record.source = type(record.source)(S, Epoch("w0", 1, None), 1)
    assert not await kv.verified(record)
    assert await kv.untouched(record)
    assert mover.asked == 0
