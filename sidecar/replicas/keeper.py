"""Keeps this node's replica process running, and asks it how it is.

Owns the process and its command. Invariant: nothing of it is ever the reason for a sidecar not to start, not to serve
or not to end: where it does not start it is tried again after pauses that grow, and said so; where it does not answer,
there are no figures. Only what is configured wrongly is told before anything starts.
"""

import asyncio
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from ...session.errors import ConfigError, Refused
from ...session.ids import SessionId
from ..config import Fleet, Replicas
from ..fleet.backoff import Backoff
from ..processes import dies_with_parent
from .peer_wire import BASE
from .remotes import parse_remotes

SOCKET = "replicas.sock"
CHECK_EVERY_S = 1.0
FIRST_S, LARGEST_S = 1.0, 60.0
# One that ran for so long did start: the next pause is short again.
STARTED_S = 30.0
ANSWER_S = 1.0
STATUS_BYTES_MAX = 4 << 20
STOP_S = 8.0

_LOG = logging.getLogger("midstream.replicas")


def is_wanted(settings: Replicas) -> bool:
    """Whether anything is to be kept elsewhere, or kept here for others."""
    return bool(settings.to) or settings.memory_bytes > 0


def writer_name(fleet: Fleet) -> str:
    """What this node's objects are filed under elsewhere: its name in the fleet, in the letters that are allowed."""
    name = re.sub(r"[^a-z0-9.-]+", "-", (fleet.name or socket.gethostname()).lower()).strip(".-")
    return name[:63] or "node"


def command(settings: Replicas, fleet: Fleet, state: Path, store_dir: str | None) -> list[str]:
    """How the process is started. ConfigError when a store's URL cannot be one."""
    try:
        parse_remotes(settings.to)
    except ValueError as error:
        raise ConfigError(f"replicas.to: {error}") from error
    if settings.to and store_dir is None:
        raise ConfigError("replicas.to: what is kept elsewhere is what is stored here first; set store.dir, too")
    words = [
        sys.executable, "-m", "midstream.sidecar.replicas", "--socket", str(state / SOCKET),
        "--writer", writer_name(fleet), "--to", settings.to, "--bytes-per-s", str(settings.bandwidth),
        "--remote-bytes-max", str(settings.bytes_max), "--memory-bytes", str(settings.memory_bytes),
    ]  # fmt: skip
    named = {
        "--store": store_dir, "--listen": settings.listen, "--secret-file": fleet.secret_file,
        "--tls-certificate": settings.tls_cert, "--tls-key": settings.tls_key, "--tls-ca": settings.tls_ca,
        "--mooncake-python": settings.mooncake_python,
    }  # fmt: skip
    return words + [word for flag, value in named.items() if value for word in (flag, value)]


class ReplicasKeeper:
    """Starts the process and starts it again when it ends."""

    def __init__(self, command: Sequence[str], socket_path: Path) -> None:
        self._command = list(command)
        self.socket = socket_path
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff = Backoff(FIRST_S, LARGEST_S, random.random)
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Look after it until cancelled."""
        loop = asyncio.get_running_loop()
        began_s = not_before_s = 0.0
        while True:
            now_s = loop.time()
            if not self._runs() and now_s >= not_before_s:
                if self._process is not None:
                    _LOG.error("event=replicas_lost serving=on code=%s", self._process.returncode)
                if now_s - began_s > STARTED_S:
                    self._backoff.succeeded()
                try:
                    self._start()
                except OSError as error:
                    _LOG.error("event=replicas_start serving=on error=%s", error)
                began_s, not_before_s = now_s, now_s + self._backoff.wait_s()
            await asyncio.sleep(CHECK_EVERY_S)

    async def status(self) -> Mapping[str, Any] | None:
        """Its figures by name; None when it does not answer."""
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as session,
                session.get(f"http://replicas{BASE}/status") as answer,
            ):
                if (answer.content_length or STATUS_BYTES_MAX + 1) > STATUS_BYTES_MAX:
                    return None
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
        return {**found, "restarts": self.restarts} if isinstance(found, dict) else None

    async def bring(self, session: SessionId, to: str, *, within_s: float) -> dict[str, Any]:
        """Have the session's latest snapshot brought to a peer's memory; what is there then. Raises Refused."""
        try:
            async with (
                asyncio.timeout(within_s),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as http,
                http.post(f"http://replicas{BASE}/bring/{session}", json={"to": to}) as answer,
            ):
                found = await answer.json()
                status = answer.status
        except TimeoutError:
            raise Refused("slow", f"session {session}: not brought to {to} within {within_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Refused("no_replicas", f"the replica process does not answer ({error}); see its log") from error
        if status != 200 or not isinstance(found, dict):
            told = found if isinstance(found, dict) else {}
            raise Refused(f"replica_{told.get('reason', status)}", str(told.get("error", f"status {status}")))
        return found

    async def finished(self, session: SessionId) -> None:
        """Tell it that a session is over which others have brought here. Where it does not answer, time tells."""
        with suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with (
                asyncio.timeout(ANSWER_S),
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.socket))) as http,
                http.post(f"http://replicas{BASE}/finish/{session}"),
            ):
                return

    def stop(self) -> None:
        """End it; it has nothing that would be lost, but what it keeps for others."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self.restarts += 1
        # Not in a worker thread: the death signal is tied to the thread that forks. A session of its own: a signal to
        # the sidecar's group must not end it before the last restore.
        self._process = subprocess.Popen(
            [*self._command, "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )
