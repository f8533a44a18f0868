"""The mover as a process: its options, and the wiring of its parts.

    python -m midstream.sidecar.mover --socket PATH --holder PATH [--store DIR [--store-bytes-max N]
        [--snapshot-every-s S] [--tail-every-tokens N]]
        [--memory-bytes N [--memory-bytes-per-s N] [--memory-tail-tokens N]] [--replicas PATH]
        [--parent-pid PID]

SIGTERM ends it in good order: restores under way are answered as failed, so that no engine waits for them. With
`--parent-pid` it ends when that process does. A GPU that has failed ends it, too, with exit status FAULT_STATUS: what
such a process would copy from then on is not to be trusted, and a new one may find the GPU working. Before that it
notes which arenas the fault may have touched, beside its socket; until it could do so it stays and refuses them itself.
"""

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import socket
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ...session.disk_store import DiskStore
from ...session.errors import ConfigError, StoreError
from ...session.held import HolderClient
from ..private_socket import private_socket
from ..told_to_end import told_to_end
from .counters import Counters
from .device import Devices
from .lineage import Lineage
from .memory_saver import MemorySaver, SavePolicy
from .memory_tier import MemoryTier
from .operations import Operations
from .restorer import RUNNING_MAX, Restorer
from .server import CONNECTIONS_MAX, Server
from .snapshots import Policy, Snapshotter
from .sources import Sources
from .sums import Sums
from .suspects import Suspects, suspects_beside
from .watcher import POLL_S, Watcher

if TYPE_CHECKING:
    from ..replicas.peer_store import PeerStore

STORE_BYTES_MAX = 64 << 30
THREADS_MAX = RUNNING_MAX + 16
FAULT_STATUS = 3
# How long restores have to tell their engines; a thread may be caught in the driver for good.
FAULT_S = 2.0
# A folder that takes no file, full or read-only, is tried again after this long.
NOTE_AGAIN_S = 1.0
REPLICA_ANSWER_S = 5.0

_log = logging.getLogger(__name__)


def main(arguments: list[str] | None = None) -> int:
    """Run until SIGTERM; returns the exit status."""
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s mover %(message)s", stream=sys.stderr)
    store = _open_store(options)
    try:
        with private_socket(options.socket, socket.SOCK_STREAM, backlog=CONNECTIONS_MAX) as listener:
            asyncio.run(_serve(options, listener, store))
    except ConfigError as error:
        print(f"mover: {error}", file=sys.stderr)
        return 1
    finally:
        if store is not None:
            store.close()
    return 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="midstream.sidecar.mover", description="Copies KV between pools and disk.")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--holder", required=True)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--store-bytes-max", type=int, default=STORE_BYTES_MAX)
    parser.add_argument("--snapshot-every-s", type=float, default=0.0, help="0: only when asked")
    parser.add_argument("--tail-every-tokens", type=int, default=16, help="new positions that make a snapshot due")
    parser.add_argument(
        "--memory-bytes", type=int, default=0, help="host memory that full blocks are copied to; 0: none"
    )
    parser.add_argument("--memory-bytes-per-s", type=int, default=10_000_000_000, help="the most that this may take")
    parser.add_argument(
        "--memory-tail-tokens", type=int, default=0, help="new positions that make a tail due; 0: never"
    )
    parser.add_argument("--replicas", type=Path, help="socket of the process that has snapshots elsewhere")
    parser.add_argument("--poll-s", type=float, default=POLL_S)
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    options = parser.parse_args(arguments)
    if options.snapshot_every_s < 0 or options.tail_every_tokens < 1 or options.store_bytes_max < 1:
        parser.error("--snapshot-every-s must be 0 or more, --tail-every-tokens and --store-bytes-max at least 1")
    if options.memory_bytes < 0 or options.memory_bytes_per_s < 1 or options.memory_tail_tokens < 0:
        parser.error("--memory-bytes-per-s must be at least 1, --memory-bytes and --memory-tail-tokens 0 or more")
    if not 0.001 <= options.poll_s <= 1:
        parser.error("--poll-s must be 0.001 to 1")
    return options


def _open_store(options: argparse.Namespace) -> DiskStore | None:
    """The store, or None when there is none or it cannot be used: serving goes on without, and the log says so."""
    if options.store is None:
        return None
    try:
        return DiskStore(options.store, bytes_max=options.store_bytes_max)
    except StoreError as error:
        _log.error("event=no_store serving=on error=%s", error)
        return None


def _replicas(options: argparse.Namespace) -> "PeerStore | None":
    """What is elsewhere, as the process beside this one gives it; it may come and go."""
    if options.replicas is None:
        return None
    # An HTTP client, which a mover without it has no use for.
    from ..replicas.peer_store import Peer, PeerStore

    return PeerStore(Peer("http://replicas", socket=options.replicas), answer_s=REPLICA_ANSWER_S)


async def _serve(options: argparse.Namespace, listener: socket.socket, store: DiskStore | None) -> None:
    # A disk that hangs holds its threads for good; there are enough for all restores beside it.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="mover"))
    # While threads copy, the loop gets its turn after this long, and a thread that starts a copy gets its own while
    # the loop plans the next one: each call of a driver gives the interpreter up, and waits for it again.
    sys.setswitchinterval(0.0002)
    # What was imported lives as long as the process: a collection that goes through it takes longer than a copy.
    gc.freeze()
    counters = Counters()
    fault = _Fault(asyncio.get_running_loop())
    suspects = Suspects(suspects_beside(options.socket))
    holder = HolderClient(options.holder)
    sources = Sources(holder, Devices(fault.tell), suspects)
    sums, lineage = Sums(), Lineage()
    snapshotter = None
    if store is not None:
        policy = Policy(options.snapshot_every_s, options.tail_every_tokens)
        snapshotter = Snapshotter(sources, sums, counters, store, policy, lineage)
    tier = saver = None
    if options.memory_bytes:
        tier = MemoryTier(holder, options.memory_bytes)
    replica = _replicas(options)
    restorer = Restorer(sources, sums, counters, store, tier, replica, lineage)
    if tier is not None:
        saving = SavePolicy(options.memory_bytes_per_s, options.memory_tail_tokens)
        saver = MemorySaver(sources, sums, counters, tier, saving, restorer.way)
    followers = [follower for follower in (snapshotter, saver) if follower is not None]
    watcher = Watcher(sources, sums, counters, *followers, poll_s=options.poll_s, way=restorer.way)
    operations = Operations(sources, sums, counters, watcher, restorer, store, snapshotter, tier, saver, replica)
    server = Server(operations.handlers(), counters)
    jobs: list[Coroutine[Any, Any, object]] = [
        server.serve(listener),
        watcher.run(),
        _told_to_end(options.parent_pid, tier),
        _noted(fault, sources, suspects),
    ]
    if snapshotter is not None:
        jobs.append(snapshotter.run())
    if tier is not None and saver is not None:
        jobs += [tier.run(), saver.run()]
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        # Each runs until it is told to end; the first that does, or that fails, ends all.
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        restorer.close()
        if tier is not None:
            tier.close()
        for task in tasks:
            task.cancel()
        if fault.happened.is_set():
            await asyncio.wait(tasks, timeout=FAULT_S)
            fault.end(store, sources, suspects)
        await asyncio.gather(*tasks, return_exceptions=True)


class _Fault:
    """A GPU that failed: told from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.happened = asyncio.Event()

    def tell(self, text: str) -> None:
        """It happened, and this is what. Restores are cancelled, and the process ends."""
        _log.error("event=gpu_failed error=%s", text)
        self._loop.call_soon_threadsafe(self.happened.set)

    def end(self, store: DiskStore | None, sources: Sources, suspects: Suspects) -> NoReturn:
        """End without waiting for threads that the driver may never let go of."""
        # Whoever else has ended this process may have come before the note.
        sources.note_fault()
        with contextlib.suppress(OSError):
            suspects.save()
        if store is not None:
            store.close()
        logging.shutdown()
        os._exit(FAULT_STATUS)


async def _noted(fault: _Fault, sources: Sources, suspects: Suspects) -> None:
    """Return when there was a fault and what it may have touched is on disk."""
    await fault.happened.wait()
    sources.note_fault()
    said = False
    while True:
        try:
            await asyncio.to_thread(suspects.save)
        except OSError as error:
            if not said:
                _log.error("event=suspects_not_saved staying=on error=%s", error)
                said = True
            await asyncio.sleep(NOTE_AGAIN_S)
        else:
            return


async def _told_to_end(parent_pid: int | None, tier: MemoryTier | None) -> None:
    """Return on SIGTERM, SIGINT, or the end of the parent: then nobody goes on with anything that is kept in memory."""
    await told_to_end(parent_pid)
    if tier is not None:
        await asyncio.to_thread(tier.forget)
