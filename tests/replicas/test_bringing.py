"""One session is brought to the memory of one node, because it is to go on there: real movers and replica processes."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.replicas.keeper import ReplicasKeeper
from support.mover_rig import Processes, Worker
from support.peers import Fleet, ReplicaProcess, make_fleet, start_replicas

SESSION = SessionId("1" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = list(range(100, 109))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("fleet") / "files")


class Node:
    """Holder, mover and replica process of one node, which sends nothing anywhere by itself."""

    def __init__(self, folder: Path, fleet: Fleet, *flags: str) -> None:
        folder.mkdir()
        self.folder = folder
        store = folder / "store"
        self.replicas: ReplicaProcess = start_replicas(
            "--store", str(store), *flags, *fleet.flags, peer=True, writer=folder.name
        )
        self.processes = Processes(folder)
        self.holder = self.processes.start_holder()
        socket = self.processes.start_mover(
            "--poll-s", "0.005", "--store", str(store), "--replicas", str(self.replicas.socket)
        )
        self.mover = MoverClient(socket)
        self.keeper = ReplicasKeeper([], self.replicas.socket)
        self.workers: list[Worker] = []

    @property
    def place(self) -> str:
        return f"peer://127.0.0.1:{self.replicas.port}"

    def worker(self, name: str) -> Worker:
        self.workers.append(Worker(self.folder, name, self.holder))
        return self.workers[-1]

    async def close(self) -> None:
        for worker in self.workers:
            worker.close()
        await self.mover.close()
        self.processes.stop()
        self.replicas.close()
        assert "Traceback" not in self.processes.log()


@pytest.fixture
async def both(tmp_path: Path, fleet: Fleet) -> AsyncIterator[tuple[Node, Node]]:
    """The node that has the session, and the one where it is to go on."""
    nodes = tuple(Node(tmp_path / name, fleet, "--memory-bytes", str(64 << 20)) for name in ("here", "there"))
    yield nodes  # type: ignore[misc]
    for node in nodes:
        await node.close()


async def test_what_was_brought_is_what_the_session_goes_on_from(both: tuple[Node, Node]) -> None:
    here, there = both
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    assert not (await there.mover.replicated(SESSION)).found
    brought = await here.keeper.bring(SESSION, there.place, within_s=10)
    assert (brought["generation"], brought["kv_len"]) == (1, 14)
    assert brought["size_bytes"] > 0

    new = there.worker("new")
    slot = new.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
    result = await there.mover.restore(
        SESSION, source=None, to_arena=new.arena, to_generation=2, deadline_s=5, from_replica=True
    )
    assert result.ok, result
    assert slot.inbox() == (LoadState.DONE, 14)
    assert len(new.right([*PROMPT, *OUTPUTS], range(14), [9, 8, 7, 6])) == 14


async def test_the_second_time_only_what_is_new_crosses_the_network(both: tuple[Node, Node]) -> None:
    here, there = both
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    first = await here.keeper.bring(SESSION, there.place, within_s=10)
    again = await here.keeper.bring(SESSION, there.place, within_s=10)
    assert first["size_bytes"] > 0
    assert again["size_bytes"] == 0
    assert again["kv_len"] == first["kv_len"]
    assert (await here.keeper.status() or {})["bring_brought"] == 2


async def test_whatever_is_in_the_way_is_said_within_its_time(both: tuple[Node, Node], fleet: Fleet) -> None:
    here, there = both

    async def refused(session: SessionId, to: str) -> str:
        began_s = time.monotonic()
        with pytest.raises(Refused) as caught:
            await here.keeper.bring(session, to, within_s=20)
        assert time.monotonic() - began_s < 15
        return caught.value.reason

    assert await refused(SESSION, there.place) == "replica_missing"
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    for wrong in ("s3://bucket/prefix", "peer://nowhere", f"{there.place},{there.place}", "", "x"):
        assert await refused(SESSION, wrong) == "replica_request"
    full = start_replicas("--memory-bytes", "1", *fleet.flags, peer=True, writer="full")
    try:
        assert await refused(SESSION, f"peer://127.0.0.1:{full.port}") == "replica_full"
    finally:
        full.close()
    there.replicas.kill()
    assert await refused(SESSION, there.place) == "replica_unreachable"
    here.replicas.kill()
    assert await refused(SESSION, there.place) == "no_replicas"


async def test_what_was_brought_goes_first_when_its_session_is_over(both: tuple[Node, Node], fleet: Fleet) -> None:
    here, there = both
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    await here.keeper.bring(SESSION, there.place, within_s=10)
    kept = there.replicas.peer(fleet)
    assert [line.finished for line in await asyncio.to_thread(kept.list)] == [False]
    await there.keeper.finished(SESSION)
    assert [line.finished for line in await asyncio.to_thread(kept.list)] == [True]
    # Of what is not known, and where nobody answers, nothing comes.
    await there.keeper.finished(SessionId("2" * 32))
    there.replicas.kill()
    await there.keeper.finished(SESSION)
