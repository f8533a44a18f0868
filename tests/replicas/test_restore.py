"""A session whose node is gone goes on from a store elsewhere: real movers and replica processes of two nodes."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from midstream.session.arena import LoadState
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.mover.protocol import MoverError, Reason, RestoreResult
from support.mover_rig import KEY, Processes, Worker
from support.peers import Fleet, ReplicaProcess, make_fleet, start_replicas, wire_to

SESSION = SessionId("1" * 32)
PROMPT = [5, 6, 7, 8, 9, 10]
OUTPUTS = list(range(100, 109))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return make_fleet(tmp_path_factory.mktemp("fleet") / "files")


class Node:
    """Holder, mover and replica process of one node."""

    def __init__(self, folder: Path, replicas: ReplicaProcess) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.replicas = replicas
        self.processes = Processes(folder)
        self.holder: HolderClient = self.processes.start_holder()
        path = self.processes.start_mover(
            "--poll-s", "0.005", "--store", str(folder / "store"), "--replicas", str(replicas.socket)
        )
        self.mover = MoverClient(path)
        self.workers: list[Worker] = []

    def worker(self, name: str, **options: object) -> Worker:
        self.workers.append(Worker(self.folder, name, self.holder, **options))  # type: ignore[arg-type]
        return self.workers[-1]

    async def close(self) -> None:
        for worker in self.workers:
            worker.close()
        await self.mover.close()
        self.processes.stop()
        self.replicas.close()
        assert "Traceback" not in self.processes.log()


@pytest.fixture
async def there(tmp_path: Path, fleet: Fleet) -> AsyncIterator[Node]:
    """The node that keeps snapshots for others, and goes on with their sessions."""
    replicas = start_replicas("--memory-bytes", str(64 << 20), *fleet.flags, peer=True, writer="there")
    node = Node(tmp_path / "there", replicas)
    yield node
    await node.close()


@pytest.fixture
async def here(tmp_path: Path, fleet: Fleet, there: Node) -> AsyncIterator[Node]:
    """The node that is lost."""
    folder = tmp_path / "here"
    replicas = start_replicas(
        "--store", str(folder / "store"), "--to", f"peer://127.0.0.1:{there.replicas.port}", *fleet.flags, writer="here"
    )
    node = Node(folder, replicas)
    yield node
    await node.close()


async def replicated(node: Node, kv_len: int, within_s: float = 15) -> None:
    """Until the node's mover is told of so many positions elsewhere."""
    deadline = time.monotonic() + within_s
    while (await node.mover.replicated(SESSION)).kv_len < kv_len:
        assert time.monotonic() < deadline, "it was not replicated"
        await asyncio.sleep(0.05)


async def restore(node: Node, worker: Worker, deadline_s: float = 5) -> RestoreResult:
    return await node.mover.restore(
        SESSION, source=None, to_arena=worker.arena, to_generation=2, deadline_s=deadline_s, from_replica=True
    )


async def test_a_session_goes_on_at_another_node_after_its_own_was_killed(here: Node, there: Node) -> None:
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    await replicated(there, 14)
    here.processes.stop()
    here.replicas.kill()

    found = await there.mover.replicated(SESSION)
    assert (found.found, found.generation, found.kv_len, found.outputs, found.key) == (True, 1, 14, 9, KEY)
    # Its own disk has nothing.
    assert not (await there.mover.stored(SESSION)).found
    new = there.worker("new", block_count=48, gap_bytes=100)
    slot = new.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
    result = await restore(there, new)
    assert result.ok, result
    assert (result.tokens, result.blocks_verified) == (14, 4)
    assert slot.inbox() == (LoadState.DONE, 14)
    assert len(new.right([*PROMPT, *OUTPUTS], range(14), [9, 8, 7, 6])) == 14


async def test_what_a_replica_is_used_for_is_checked_as_what_is_on_disk(here: Node, there: Node) -> None:
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    await replicated(there, 14)
    for reason, worker, prompt, outputs in [
        (Reason.KEY, there.worker("key", key={"engine": "rig", "model": "other"}), PROMPT, OUTPUTS),
        (Reason.PROMPT, there.worker("prompt"), [9, 9, 9, 9, 9, 9], OUTPUTS),
        (Reason.TOKENS, there.worker("tokens"), PROMPT, [*OUTPUTS[:-2], 7, 8]),
        (Reason.INCOMPLETE, there.worker("more"), PROMPT, [*OUTPUTS, 109, 110]),
    ]:
        slot = worker.wait(SESSION, prompt, outputs, [9, 8, 7, 6, 5])
        result = await restore(there, worker)
        assert not result.ok
        assert result.reason in (reason.value, Reason.TOKENS.value if reason is Reason.INCOMPLETE else reason.value)
        assert slot.inbox() == (LoadState.FAILED, 0)


async def test_a_node_that_knows_nothing_of_a_session_says_so_at_once(there: Node) -> None:
    assert not (await there.mover.replicated(SESSION)).found
    new = there.worker("new")
    slot = new.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
    result = await restore(there, new)
    assert (result.ok, result.reason) == (False, "store")
    assert slot.inbox() == (LoadState.FAILED, 0)


async def test_without_a_replica_process_a_restore_fails_and_all_else_works(here: Node, there: Node) -> None:
    there.replicas.kill()
    there.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await there.mover.snapshot(there.workers[0].arena)
    with pytest.raises(MoverError) as unreachable:
        await there.mover.replicated(SESSION)
    assert unreachable.value.reason is Reason.STORE
    new = there.worker("new")
    new.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
    assert (await restore(there, new)).reason == "store"
    # From its own disk it is as ever.
    again = there.worker("again")
    again.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
    result = await there.mover.restore(SESSION, source=None, to_arena=again.arena, to_generation=2, deadline_s=5)
    assert result.ok, result


async def test_a_peer_that_hangs_costs_no_restore_from_disk_its_time(here: Node, there: Node) -> None:
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    await replicated(there, 14)
    there.replicas.process.send_signal(signal.SIGSTOP)
    waiting = []
    for number in range(8):
        worker = there.worker(f"w{number}")
        worker.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
        waiting.append(asyncio.create_task(restore(there, worker, deadline_s=4)))
    there.worker("own").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await there.mover.snapshot(there.workers[-1].arena)
    again = there.worker("again")
    again.wait(SESSION, PROMPT, OUTPUTS, [9, 8, 7, 6])
    began = time.monotonic()
    result = await there.mover.restore(SESSION, source=None, to_arena=again.arena, to_generation=2, deadline_s=5)
    assert result.ok, result
    assert time.monotonic() - began < 1.5
    for failed in await asyncio.gather(*waiting):
        assert not failed.ok
    there.replicas.process.send_signal(signal.SIGCONT)


async def test_a_session_that_decodes_on_is_followed_and_only_its_new_blocks_are_sent(here: Node, there: Node) -> None:
    old = here.worker("old")
    outputs = [100]
    slot = old.run(SESSION, PROMPT, outputs, list(range(1, 20)))
    for token in range(101, 140):
        old.decode(slot, PROMPT, outputs, list(range(1, 20)), token)
        if token % 8 == 0:
            await here.mover.snapshot(old.arena)
            await replicated(there, len(PROMPT) + len(outputs) - 1)
    status = here.replicas.local().json("GET", "/status")
    # 11 full blocks, and a tail with each of the five snapshots at most; never all of it again.
    assert status["peer_chunks_sent"] <= 16
    assert status["peer_chunks_there"] > 0
    assert (status["peer_up"], status["peer_lag_tokens"], status["peer_sessions_behind"]) == (1, 0, 0)


async def test_a_slow_wire_means_lag_which_is_told_and_then_is_gone(tmp_path: Path, fleet: Fleet, there: Node) -> None:
    folder = tmp_path / "slow"
    with wire_to(there.replicas.port) as wire:
        replicas = start_replicas(
            "--store", str(folder / "store"), "--to", f"peer://127.0.0.1:{wire.port}", *fleet.flags, writer="slow"
        )
        node = Node(folder, replicas)
        wire.bytes_per_s = 500.0
        node.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
        await node.mover.snapshot(node.workers[0].arena)
        await asyncio.sleep(1.5)
        local = replicas.local()
        status, lag = local.json("GET", "/status"), local.json("GET", "/lag")
        assert status["peer_lag_tokens"] == status["peer_lag_tokens_max"] == 14
        assert status["peer_lag_seconds_max"] > 0.5
        assert lag["peer"][SESSION]["tokens"] == 14
        wire.bytes_per_s = None
        await replicated(there, 14)
        deadline = time.monotonic() + 10
        while local.json("GET", "/status")["peer_lag_tokens"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await node.close()


async def test_a_peer_that_was_started_anew_is_given_everything_again(tmp_path: Path, fleet: Fleet) -> None:
    peer = start_replicas("--memory-bytes", str(64 << 20), *fleet.flags, peer=True)
    folder = tmp_path / "here"
    replicas = start_replicas(
        "--store", str(folder / "store"), "--to", f"peer://127.0.0.1:{peer.port}", *fleet.flags, writer="here"
    )
    node = Node(folder, replicas)
    node.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await node.mover.snapshot(node.workers[0].arena)
    await replicated(node, 14)
    peer.kill()
    again = start_replicas("--memory-bytes", str(64 << 20), *fleet.flags, peer=True, port=peer.port)
    # Nothing new has happened to the session; that the peer lost it is found out all the same.
    deadline = time.monotonic() + 60
    store = again.peer(fleet)
    while store.latest(SESSION) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    await node.close()
    again.close()
    peer.close()


async def test_sessions_that_are_over_are_told_to_the_store_and_go_first_there(
    here: Node, there: Node, fleet: Fleet
) -> None:
    here.worker("old").run(SESSION, PROMPT, OUTPUTS, [1, 2, 3, 4])
    await here.mover.snapshot(here.workers[0].arena)
    await replicated(there, 14)
    store = there.replicas.peer(fleet)
    assert [line.finished for line in store.list()] == [False]
    await here.mover.finish(SESSION, 1)
    deadline = time.monotonic() + 10
    while [line.finished for line in store.list()] != [True]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)
