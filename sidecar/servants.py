"""The two helpers of a sidecar, kept running: the holder, which outlives it, and the mover, which does not.

A holder that died has lost its descriptors, not the memory: live engines still map their pools, so a new holder gets
them again from there. A mover that died has lost its checksums and mappings; it is started again and told what to
watch.
"""

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..session.errors import MidstreamError, PoolError
from ..session.held import HolderClient, rescue
from ..session.layout import HOST
from .private_socket import peer_pid
from .processes import dies_with_parent

_LOG = logging.getLogger("midstream.servants")

CHECK_EVERY_S = 1.0
START_TIMEOUT_S = 10.0
# A mover takes stock of its store before it answers; one that has ended is noticed at once all the same.
MOVER_START_TIMEOUT_S = 60.0
# One that lives and has not answered for so long is hung, or its socket was removed: it is killed, and another started.
DEAF_S = 30.0
ANSWER_TIMEOUT_S = 2.0
KILL_TIMEOUT_S = 5.0


def _is_out_of_descriptors(error: BaseException | None) -> bool:
    """Whether it is this process that cannot ask, which says nothing of the one that is asked."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class HolderKeeper:
    """Starts the holder if none answers, and starts another when it is gone."""

    def __init__(self, socket: Path, *, on_restart: Callable[[], None]) -> None:
        self.socket = socket
        self.client = HolderClient(socket)
        self.pid: int | None = None
        self._on_restart = on_restart
        self._metas: dict[str, Mapping[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        # Of a holder that a sidecar before this one has started.
        self._inherited_fd: int | None = None
        self._heard_s = time.monotonic()

    async def ensure(self) -> None:
        """A holder answers when this returns; MidstreamError when none can be started."""
        if await asyncio.to_thread(self._answers):
            self._note_inherited()
            return
        if self._process is None or self._process.poll() is not None:
            self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Of its own session and without a death signal: it must outlive this process.
            self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork, once
                [sys.executable, "-m", "midstream.sidecar.holder", "--socket", str(self.socket)],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self.pid = self._process.pid
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while not await asyncio.to_thread(self._answers):
            if self._process.poll() is not None or asyncio.get_running_loop().time() > deadline:
                raise MidstreamError(f"the holder at {self.socket} does not start; see its last line above")
            await asyncio.sleep(0.02)

    async def learn(self, pool: str) -> None:
        """Remember what would be needed to have a new holder keep this pool again."""
        if pool in self._metas:
            return
        with suppress(PoolError):
            fd, meta = await asyncio.to_thread(self.client.get, pool)
            os.close(fd)
            self._metas[pool] = meta

    def sizes(self, pool: str) -> tuple[int, int] | None:
        """How many blocks a pool has, and how many positions are in one; None where that is not known."""
        layout = self._metas.get(pool, {}).get("layout")
        if not isinstance(layout, Mapping):
            return None
        count, tokens = layout.get("block_count"), layout.get("block_tokens")
        return (count, tokens) if type(count) is int and type(tokens) is int else None

    def forget(self, pool: str) -> None:
        """Let a pool go: with its last descriptor its memory is free."""
        self._metas.pop(pool, None)
        try:
            self.client.drop(pool)
        except PoolError as error:
            _LOG.warning("event=drop pool=%s error=%s", pool, error)

    async def keep(self) -> None:
        """Look after the holder until cancelled."""
        lost = False
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._process is not None:
                self._process.poll()
            if not lost and await asyncio.to_thread(self._answers):
                continue
            # Until its pools were given to the new one, which may answer only some time after it was waited for.
            lost = True
            _LOG.error("event=holder_lost socket=%s", self.socket)
            if time.monotonic() - self._heard_s > DEAF_S:
                self._end_deaf()
            try:
                await self.ensure()
            except (MidstreamError, OSError) as error:
                _LOG.error("event=holder_start error=%s", error)
                continue
            lost = False
            self._on_restart()
            for pool, meta in list(self._metas.items()):
                await asyncio.to_thread(self._rescue, pool, meta)

    async def retire(self) -> None:
        """End the holder if it keeps nothing; one that keeps a pool outlives this process."""
        with suppress(PoolError):
            if not await asyncio.to_thread(self.client.list):
                await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)
        elif self._inherited_fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inherited_fd, signal.SIGTERM)
            waiting = select.poll()
            waiting.register(self._inherited_fd, select.POLLIN)
            waiting.poll(KILL_TIMEOUT_S * 1000)

    def _note_inherited(self) -> None:
        """Remember whose the socket is, if it is no child of ours."""
        if self._process is not None or self._inherited_fd is not None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe, suppress(OSError):
            probe.settimeout(ANSWER_TIMEOUT_S)
            probe.connect(str(self.socket))
            self._inherited_fd = os.pidfd_open(peer_pid(probe))

    def _end_deaf(self) -> None:
        """Kill a holder that lives and does not answer: nobody could start another in its place."""
        self._heard_s = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            _LOG.error("event=holder_deaf pid=%s action=killed", self.pid)
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)
        if self._inherited_fd is not None:
            _LOG.error("event=holder_deaf action=killed")
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._inherited_fd, signal.SIGKILL)
            os.close(self._inherited_fd)
            self._inherited_fd = None

    def _rescue(self, pool: str, meta: Mapping[str, Any]) -> None:
        owner = meta.get("owner") or {}
        try:
            fd = rescue(int(owner["pid"]), int(owner["fd"]), str(meta.get("memory", HOST)))
            try:
                self.client.put(pool, fd, meta)
            finally:
                os.close(fd)
        except (PoolError, KeyError, ValueError, TypeError) as error:
            self._metas.pop(pool, None)
            _LOG.warning("event=pool_lost pool=%s error=%s", pool, error)
        else:
            _LOG.info("event=pool_rescued pool=%s", pool)

    def _answers(self) -> bool:
        try:
            self.client.list()
        except PoolError as error:
            return _is_out_of_descriptors(error.__cause__)
        self._heard_s = time.monotonic()
        return True


class MoverKeeper:
    """Starts the mover and starts it again when it dies."""

    def __init__(self, command: list[str], socket: Path, *, on_start: Callable[[], None]) -> None:
        self._command = command
        self.socket = socket
        self._on_start = on_start
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        """Of the running mover."""
        return None if self._process is None else self._process.pid

    async def ensure(self) -> None:
        """A mover is running when this returns; MidstreamError when it does not start."""
        if not self._runs():
            self._start()
        elif self._answered:
            return
        deadline = asyncio.get_running_loop().time() + MOVER_START_TIMEOUT_S
        # A mover that was killed has left its socket behind: only an answer is a sign of life.
        while not self._listens():
            if not self._runs() or asyncio.get_running_loop().time() > deadline:
                raise MidstreamError(f"the mover at {self.socket} does not start; see its last line above")
            await asyncio.sleep(0.02)
        self._answered = True
        self._on_start()

    async def keep(self) -> None:
        """Look after the mover until cancelled."""
        heard_s = time.monotonic()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            if self._runs() and self._answered:
                if await asyncio.to_thread(self._answers):
                    heard_s = time.monotonic()
                if time.monotonic() - heard_s <= DEAF_S:
                    continue
                _LOG.error("event=mover_deaf pid=%s action=killed", self.pid)
                self._kill()
            if not self._runs():
                _LOG.error("event=mover_lost socket=%s", self.socket)
            heard_s = time.monotonic()
            try:
                await self.ensure()
            except (MidstreamError, OSError) as error:
                _LOG.error("event=mover_start error=%s", error)

    def _answers(self) -> bool:
        """Whether it does its work; a process that was stopped still has a socket that takes connections."""
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(ANSWER_TIMEOUT_S)
                probe.connect(str(self.socket))
                probe.sendall(b'{"op":"status"}\n')
                return bool(probe.recv(1))
        except OSError as error:
            return _is_out_of_descriptors(error)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_TIMEOUT_S)

    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self.restarts += 1
        self._answered = False
        self.socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # That of a mover that was killed would be taken for the new one's.
        self.socket.unlink(missing_ok=True)
        # Not in a worker thread: the death signal is tied to the thread that forks.
        # A session of its own: a signal to the sidecar's group must not end it before the last restore.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dies_with_parent(signal.SIGTERM),
        )

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def stop(self) -> None:
        """End it; it has nothing that would be lost."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
