"""The process that keeps snapshots elsewhere: the only wiring of couriers, the peer's memory and what restores read.

A process of its own, beside the mover: it may be slow, full or gone, and no restore from nearer and no token waits for
it. It reads the mover's store and never writes there; the mover reads from it over a Unix socket, as from a peer.
Ends on SIGTERM, SIGINT, or with its parent.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...session.disk_store import DiskStore, Head
from ...session.errors import ConfigError, StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from ..private_socket import private_socket
from ..told_to_end import told_to_end
from .bringer import Bringer
from .budget import Budget
from .chain import Chain, Member
from .contract import WRITER_NAME
from .courier import Courier
from .credentials import CredentialFiles, Credentials, read_credentials
from .local_server import LocalServer
from .memory_objects import MemoryObjects
from .object_names import Names
from .object_store import ObjectStore
from .peer_server import PeerServer
from .peer_site import serving
from .remotes import Means, check_means, open_remote, parse_remotes
from .signatures import Verifier

NICE = 5
BACKLOG = 128
JOIN_S = 5.0
LAGS_TOLD_MAX = 10_000

_LOG = logging.getLogger("midstream.replicas")


class OwnStore:
    """This node's store on disk, which the mover may not have made yet. See courier.LocalStore."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._store: DiskStore | None = None

    def heads(self) -> Sequence[Head]:
        """See LocalStore.heads."""
        return self._opened().heads() if self._root is not None else ()

    def latest(self, session: SessionId) -> Manifest | None:
        """See LocalStore.latest."""
        return self._opened().latest(session)

    def get_stored(self, name: str) -> bytes:
        """See LocalStore.get_stored."""
        return self._opened().get_stored(name)

    def _opened(self) -> DiskStore:
        if self._root is None:
            raise StoreError("this node stores nothing; start it with a store's folder")
        if self._store is None:
            self._store = DiskStore(self._root, write=False)
        return self._store


def main(arguments: list[str] | None = None) -> int:
    """Run until told to end; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s replicas %(message)s", stream=sys.stderr)
    options = _options(arguments)
    # What is said here can wait; tokens and restores cannot.
    with contextlib.suppress(OSError):
        os.nice(NICE)
    try:
        credentials = read_credentials(
            CredentialFiles(options.secret_file, options.tls_certificate, options.tls_key, options.tls_ca)
        )
        try:
            remotes = parse_remotes(options.to)
        except ValueError as error:
            raise ConfigError(f"--to {error}") from error
        means = Means(options.writer, options.remote_bytes_max, credentials, options.mooncake_python)
        check_means(remotes, means)
        own, budget = OwnStore(options.store), Budget(options.bytes_per_s)
        couriers = [
            Courier(
                remote.name,
                lambda remote=remote: open_remote(remote, means),  # type: ignore[misc]
                own,
                budget,
                every_s=remote.every_s,
                recheck_s=remote.recheck_s,
            )
            for remote in remotes
        ]
        bringer = Bringer(lambda remote: open_remote(remote, means), own, budget)
        with private_socket(options.socket, socket.SOCK_STREAM, backlog=BACKLOG) as local:
            asyncio.run(_Replicas(options, credentials, couriers, bringer).run(local))
    except ConfigError as error:
        print(f"replicas: {error}", file=sys.stderr)
        return 1
    return 0


class _Replicas:
    def __init__(
        self,
        options: argparse.Namespace,
        credentials: Credentials | None,
        couriers: Sequence[Courier],
        bringer: Bringer,
    ) -> None:
        self._bringer = bringer
        self._options = options
        self._credentials = credentials
        self._couriers = couriers
        self._kept: ObjectStore | None = None
        self._peer: PeerServer | None = None
        members: list[tuple[str, Member]] = []
        if options.memory_bytes:
            self._kept = kept = ObjectStore(MemoryObjects(), Names("", "peer"), bytes_max=options.memory_bytes)
            members.append(("memory", lambda: kept))
        for courier in couriers:
            members.append((courier.name, lambda courier=courier: courier.store))  # type: ignore[misc]
        self._chain = Chain(members)

    async def run(self, local: socket.socket) -> None:
        """Serve and send until told to end."""
        threads = [
            threading.Thread(target=courier.run, name=f"courier-{courier.name}", daemon=True)
            for courier in self._couriers
        ]
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(serving(self._local_app(), local))
            await self._listen(stack)
            for thread in threads:
                thread.start()
            await told_to_end(self._options.parent_pid)
            for courier in self._couriers:
                courier.stop()
            await asyncio.to_thread(self._bringer.close)
            for thread in threads:
                await asyncio.to_thread(thread.join, JOIN_S)

    def _local_app(self) -> Any:
        return LocalServer(self._chain, self._status, self._lag, self._bringer.bring, self._over).app()

    def _over(self, session: SessionId) -> None:
        """A session that others have brought here is over: what is kept of it may go first."""
        if self._kept is not None:
            self._kept.finish(session)

    async def _listen(self, stack: contextlib.AsyncExitStack) -> None:
        if self._kept is None or self._options.listen is None:
            return
        credentials = self._credentials
        if credentials is None:
            raise ConfigError("a peer answers nodes of its fleet alone; give a secret or certificates")
        host, port = self._options.listen
        if credentials.server is None and host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(f"{host} is beyond this machine: what is sent there needs TLS; give certificates")
        secret = credentials.secret
        verifier = Verifier(secret, not_before_s=time.time()) if secret is not None else None
        self._peer = PeerServer(self._kept, verifier)
        try:
            listener = socket.create_server((host, port), backlog=BACKLOG, reuse_port=False)
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror or error}") from error
        stack.callback(listener.close)
        listener.setblocking(False)
        await stack.enter_async_context(serving(self._peer.app(), listener, context=credentials.server))
        bound = listener.getsockname()
        _LOG.info("event=peer_listens host=%s port=%d tls=%s", bound[0], bound[1], credentials.server is not None)
        if self._options.port_file is not None:
            self._options.port_file.write_text(f"{bound[1]}\n")

    def _status(self) -> dict[str, float]:
        told = self._bringer.status()
        for courier in self._couriers:
            told |= {f"{courier.name}_{name}": value for name, value in courier.status().items()}
        told |= {f"restore_{name}": count for name, count in self._chain.counts.items()}
        if self._kept is not None:
            figures = self._kept.figures()
            told |= {
                "memory_bytes": figures.size_bytes,
                "memory_snapshots": figures.snapshots,
                "memory_evicted": figures.evicted,
                "memory_corrupt": figures.corrupt,
            }
        if self._peer is not None:
            told |= {"peer_bytes_received": self._peer.bytes_received, "peer_bytes_sent": self._peer.bytes_sent}
            told |= {f"peer_refused_{reason.value}": count for reason, count in self._peer.refused.items()}
        return told

    def _lag(self) -> dict[str, Any]:
        return {
            courier.name: {
                session: {"tokens": tokens, "seconds": round(seconds, 3)}
                for session, (tokens, seconds) in list(courier.lag_of_each().items())[:LAGS_TOLD_MAX]
            }
            for courier in self._couriers
        }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="midstream.sidecar.replicas", description="Brings snapshots to stores elsewhere, and keeps others'."
    )
    parser.add_argument("--socket", required=True, help="where this node's mover and sidecar ask")
    parser.add_argument("--writer", required=True, help="this node's name")
    parser.add_argument("--store", type=Path, help="the mover's store, which is read")
    parser.add_argument("--to", default="", help="stores elsewhere, with commas between")
    parser.add_argument("--bytes-per-s", type=int, default=125_000_000, help="the most that sending may take")
    parser.add_argument("--remote-bytes-max", type=int, default=64 << 30, help="of all that is kept in one of them")
    parser.add_argument("--listen", type=_address, help="HOST:PORT at which others' snapshots are kept; needs memory")
    parser.add_argument("--memory-bytes", type=int, default=0, help="host memory for others' snapshots; 0: none")
    parser.add_argument("--port-file", type=Path, help="where the port is told, if 0 was asked for")
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--tls-certificate", type=Path)
    parser.add_argument("--tls-key", type=Path)
    parser.add_argument("--tls-ca", type=Path)
    parser.add_argument("--mooncake-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--parent-pid", type=int, help="end when this process ends")
    options = parser.parse_args(arguments)
    if options.bytes_per_s < 1 or options.remote_bytes_max < 1 or options.memory_bytes < 0:
        parser.error("--bytes-per-s and --remote-bytes-max must be at least 1, --memory-bytes 0 or more")
    if not WRITER_NAME.fullmatch(options.writer):
        parser.error(f"--writer {options.writer!r}: lower-case letters, digits, dots and dashes, 63 at most")
    return options


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[?([0-9A-Za-z.:-]+?)\]?:([0-9]{1,5})", text)
    if found is None or int(found[2]) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected HOST:PORT")
    return found[1], int(found[2])
