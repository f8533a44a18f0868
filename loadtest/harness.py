"""A sidecar with real engines, run as users run it: started by its command line, asked by HTTP, its workers killed.

Owns the processes that it starts: after `stop` nothing is left, not even the holder. Decides no verdicts.
"""

import asyncio
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from ..session.errors import EngineError

POLL_S = 0.05
_PEER = struct.Struct("iII")  # pid, uid, gid
# What engines call the process that decodes, where that is not their first one.
_CORES = ("EngineCore", "sglang::schedul")


class Victim(StrEnum):
    """Which processes of a worker are killed."""

    CORE = "core"
    ROOT = "root"
    TREE = "tree"


class SidecarProcess:
    """One sidecar and what belongs to it.

    With `beside` it starts no engines: it stands in front of those, `[NAME=]URL` each, that others started with
    `state_dir` as their place. Then holder and folder are theirs, and stay.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int = 2,
        environ: Mapping[str, str] | None = None,
        settings: Mapping[str, object] | None = None,
        store: Path | None = None,
        beside: Sequence[str] = (),
        state_dir: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._beside = list(beside)
        self._workers = len(beside) or workers
        self._environ = {**os.environ, **(environ or {})}
        # An engine that is killed on purpose, again and again, is not a failing one.
        self._settings = {"supervise.restarts_max": 100_000, **(settings or {})}
        self.store = store
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="midstream-", dir=memory))
        self._holder_is_ours = state_dir is None
        self.state_dir = state_dir or self.folder / "state"
        self.log = self.folder / "sidecar.log"
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, http: aiohttp.ClientSession, *, timeout_s: float = 600.0) -> None:
        """Start it and wait until all workers are ready. EngineError shows the log's last lines."""
        sets = [word for k, v in self._settings.items() for word in ("--set", f"{k}={v}")]
        store = ["--store-dir", str(self.store)] if self.store is not None else []
        kind = ["serve", *(word for worker in self._beside for word in ("--worker", worker))]
        if not self._beside:
            kind = ["run", "--workers", str(self._workers)]
        argv = [
            sys.executable, "-m", "midstream.sidecar.cli", *kind, "--port", self._port(),
            "--state-dir", str(self.state_dir), *store, *sets, *(["--", *self._command] if not self._beside else []),
        ]  # fmt: skip
        with self.log.open("ab") as sink:
            # A child of this thread's process: it is ended by `stop`.
            self.process = subprocess.Popen(argv, env=self._environ, stdout=sink, stderr=sink)  # noqa: ASYNC220
        deadline = time.monotonic() + timeout_s
        while not (self.url or self._find_url()):
            await self._pause(deadline)
        await self.wait_ready(http, timeout_s=max(deadline - time.monotonic(), 1.0))

    def _port(self) -> str:
        """A free one at first; afterwards the same, as clients would expect."""
        return self.url.rsplit(":", 1)[1] if self.url else "0"

    def _find_url(self) -> str:
        for line in self.log.read_text(errors="replace").splitlines():
            if "event=listening url=" in line:
                self.url = line.split("event=listening url=")[1].split()[0]
        return self.url

    async def wait_ready(
        self, http: aiohttp.ClientSession, *, count: int | None = None, timeout_s: float = 600.0
    ) -> None:
        """Wait until `count` workers (all, if None) are ready."""
        deadline = time.monotonic() + timeout_s
        wanted = self._workers if count is None else count
        while True:
            states = [w["state"] for w in await self.workers(http)]
            if sum(s == "ready" for s in states) >= wanted:
                return
            if "failed" in states:
                raise EngineError(f"a worker has failed:\n{self.last_lines()}")
            await self._pause(deadline)

    async def wait_back(self, http: aiohttp.ClientSession, name: str, epoch: int, *, timeout_s: float = 300.0) -> None:
        """Wait until a worker whose `epoch` was killed is there again in a later one, and all others are."""
        deadline = time.monotonic() + timeout_s
        while not any(w["name"] == name and w["epoch"] > epoch for w in await self.workers(http)):
            await self._pause(deadline)
        await self.wait_ready(http, timeout_s=timeout_s)

    def require_running(self) -> None:
        """EngineError with the end of its log, if it has ended."""
        if self.process is None or self.process.poll() is not None:
            raise EngineError(f"the sidecar has ended:\n{self.last_lines()}")

    async def _pause(self, deadline: float) -> None:
        self.require_running()
        if time.monotonic() > deadline:
            raise EngineError(f"the workers did not come up in time:\n{self.last_lines()}")
        await asyncio.sleep(POLL_S)

    async def ask(self, http: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        """A JSON answer of the sidecar's own API; {} when it does not answer."""
        try:
            async with http.get(self.url + path) as answer:
                body = await answer.json()
                return body if isinstance(body, dict) else {}
        except aiohttp.ClientError:
            return {}

    async def workers(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The workers as `midstream status` shows them."""
        return list((await self.ask(http, "/midstream/v1/status")).get("workers") or [])

    async def sessions(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """The sessions as `midstream sessions` shows them, newest last."""
        return list((await self.ask(http, "/midstream/v1/sessions")).get("sessions") or [])

    async def serving(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """The worker that has a session."""
        for worker in await self.workers(http):
            if worker["sessions"] and worker["state"] == "ready":
                return worker
        raise EngineError("no worker has a session")

    def last_lines(self, count: int = 40) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    def stop(self) -> None:
        """End everything that belongs to it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._holder_is_ours:
            self.kill_holder()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill_holder(self) -> bool:
        """SIGKILL the holder, which would outlive the sidecar; False if there was none."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(str(self.state_dir / "holder.sock"))
            except OSError:
                return False
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        try:
            process = psutil.Process(_PEER.unpack(peer)[0])
            process.kill()
            process.wait(10)
        except psutil.NoSuchProcess:
            return False
        return True


def kill_worker(pid: int, victim: Victim) -> list[str]:
    """SIGKILL processes of the worker whose root process is `pid`; returns their names."""
    root = psutil.Process(pid)
    children = root.children(recursive=True)
    match victim:
        case Victim.ROOT:
            doomed = [root]
        case Victim.CORE:
            doomed = [p for p in children if any(word in p.name() for word in _CORES)] or [root]
        case Victim.TREE:
            doomed = [*children, root]
    names = []
    for process in doomed:
        try:
            names.append(f"{process.name()}:{process.pid}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    return names


def end_tree(root: "subprocess.Popen[Any]", within_s: float) -> None:
    """SIGKILL a process that was started here with all that it has started, and wait until they are gone."""
    doomed: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(root.pid)
        doomed = [*top.children(recursive=True), top]
    for process in doomed:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(doomed, timeout=within_s)
    root.wait(within_s)
