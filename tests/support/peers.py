"""Replica processes for tests: real ones, certificates of a fleet, and a wire in between that does what it is told."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import trustme

from midstream.sidecar.replicas.credentials import CredentialFiles, Credentials, read_credentials
from midstream.sidecar.replicas.loop_thread import LoopThread
from midstream.sidecar.replicas.peer_store import Peer, PeerStore

SECRET = b"a secret of the fleet, for tests"
START_S = 20.0
SLICE_S = 0.02


@dataclass(frozen=True, slots=True)
class Fleet:
    """The files of one fleet."""

    files: CredentialFiles

    @property
    def credentials(self) -> Credentials:
        found = read_credentials(self.files)
        assert found is not None
        return found

    @property
    def flags(self) -> list[str]:
        """For a replica process."""
        named = {
            "--secret-file": self.files.secret, "--tls-certificate": self.files.certificate,
            "--tls-key": self.files.key, "--tls-ca": self.files.ca,
        }  # fmt: skip
        return [word for flag, path in named.items() if path is not None for word in (flag, str(path))]

    @property
    def settings(self) -> dict[str, object]:
        """The same for a sidecar."""
        named = {
            "fleet.secret_file": self.files.secret, "replicas.tls_cert": self.files.certificate,
            "replicas.tls_key": self.files.key, "replicas.tls_ca": self.files.ca,
        }  # fmt: skip
        return {name: str(path) for name, path in named.items() if path is not None}


def make_fleet(folder: Path, *, secret: bytes | None = SECRET, tls: bool = True) -> Fleet:
    """A CA, a certificate that is good for both ends, and a secret."""
    folder.mkdir(parents=True)
    paths: dict[str, Path] = {}
    if tls:
        ca = trustme.CA()
        issued = ca.issue_cert("127.0.0.1", "localhost")
        paths = {"ca": folder / "ca.pem", "key": folder / "key.pem", "certificate": folder / "cert.pem"}
        ca.cert_pem.write_to_path(str(paths["ca"]))
        issued.private_key_pem.write_to_path(str(paths["key"]))
        issued.cert_chain_pems[0].write_to_path(str(paths["certificate"]))
    if secret is not None:
        paths["secret"] = folder / "secret"
        paths["secret"].write_bytes(secret)
        paths["secret"].chmod(0o600)
    return Fleet(CredentialFiles(**paths))


@dataclass(slots=True)
class ReplicaProcess:
    """One that runs: `port` of its peer server, if it has one, and the socket for its own node."""

    process: "subprocess.Popen[bytes]"
    socket: Path
    port: int
    folder: Path
    opened: list[PeerStore] = field(default_factory=list)

    def local(self) -> PeerStore:
        """What its mover sees."""
        store = PeerStore(Peer("http://replicas", socket=self.socket))
        self.opened.append(store)
        return store

    def peer(self, fleet: Fleet, port: int | None = None, *, answer_s: float = 10.0) -> PeerStore:
        """What another node of a fleet sees."""
        scheme = "https" if fleet.files.ca is not None else "http"
        peer = Peer(f"{scheme}://127.0.0.1:{port or self.port}", credentials=fleet.credentials)
        store = PeerStore(peer, answer_s=answer_s)
        self.opened.append(store)
        return store

    def kill(self) -> None:
        """As the kernel does it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> None:
        """End it and what was opened to it."""
        for store in self.opened:
            store.close()
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def start_replicas(*flags: str, peer: bool = False, port: int = 0, writer: str = "node") -> ReplicaProcess:
    """A replica process that answers; `peer`: it listens for others."""
    folder = Path(tempfile.mkdtemp(prefix="midstream-replicas-"))
    address, port_file = folder / "replicas.sock", folder / "port"
    command = [
        sys.executable, "-m", "midstream.sidecar.replicas", "--socket", str(address), "--writer", writer,
        "--parent-pid", str(os.getpid()), *flags,
    ]  # fmt: skip
    if peer:
        command += ["--listen", f"127.0.0.1:{port}", "--port-file", str(port_file)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + START_S
    while not (port_file.exists() and port_file.read_text() if peer else address.exists()):
        assert process.poll() is None, f"it ended with {process.returncode}"
        assert time.monotonic() < deadline, "it does not start"
        time.sleep(0.02)
    return ReplicaProcess(process, address, int(port_file.read_text()) if peer else 0, folder)


class Wire:
    """A TCP relay to a port, which may slow down, flip bits, hold, or cut what goes through it."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self.bytes_per_s: float | None = None
        # Applied to what goes to the server, and what comes from it.
        self.change_up: Callable[[bytes], bytes] = lambda piece: piece
        self.change_down: Callable[[bytes], bytes] = lambda piece: piece
        # All that went to the server, for whoever would send it again.
        self.seen = bytearray()
        self.up_bytes = 0
        self.cut_after_bytes: int | None = None
        self._loop = LoopThread("wire")
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._server = self._loop.call(self._serve(listener), 10)

    def close(self) -> None:
        """Cut everything."""
        self._loop.call(self._stop(), 10)
        self._loop.close()

    async def _serve(self, listener: socket.socket) -> asyncio.Server:
        return await asyncio.start_server(self._connected, sock=listener)

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        # Transports that were aborted close their sockets in the loop's next rounds.
        await asyncio.sleep(SLICE_S)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._pipe(reader, up_writer, True), self._pipe(up_reader, writer, False))
        except (OSError, asyncio.CancelledError):
            return
        finally:
            for end in (writer, up_writer):
                end.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool) -> None:
        while piece := await reader.read(65536):
            if is_up:
                self.seen += piece
                self.up_bytes += len(piece)
                if self.cut_after_bytes is not None and self.up_bytes >= self.cut_after_bytes:
                    raise ConnectionResetError("cut")
            left = float(len(piece))
            while (bytes_per_s := self.bytes_per_s) is not None and left > 0:
                await asyncio.sleep(SLICE_S)
                left -= bytes_per_s * SLICE_S
            writer.write((self.change_up if is_up else self.change_down)(piece))
            await writer.drain()
        writer.close()


@contextlib.contextmanager
def wire_to(port: int) -> Iterator[Wire]:
    """A wire while this is open."""
    wire = Wire(port)
    try:
        yield wire
    finally:
        wire.close()
