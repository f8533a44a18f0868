"""An engine that others start: a real process that claims its place and publishes facts, and a health route beside it.

Run as a program it is that process: `python attached_engine.py FOLDER MODE`, where MODE is what it does besides. With
MODE `core` it is a front end, and a child of it, which holds a lifeline, is the core that publishes the facts. With
MODE `lifeline` it holds one itself, and when it is told to it ends the thread that does: then it is as a process that
the kernel has begun to take down, for as long as a test needs that.
"""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path

from aiohttp import web

from midstream.adapters.alive import told_processes
from midstream.session.arena_writer import ArenaWriter
from midstream.session.lifeline import lifeline_of, take_cell
from midstream.session.ticket import claim_ticket

KEY = {
    name: name
    for name in (
        "engine",
        "engine_version",
        "device",
        "model",
        "tokenizer",
        "dtype",
        "kv_dtype",
        "kv_layout",
        "parallel",
    )
}


# The system call that ends one thread.
EXIT = {"x86_64": 60, "aarch64": 93}


class AttachedEngine:
    """The health route and the process of one worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.healthy = False
        self.failures_left = 0
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    @asynccontextmanager
    async def reachable(self) -> AsyncIterator["AttachedEngine"]:
        """Answer /health at `url`."""

        async def health(_: web.Request) -> web.Response:
            if self.failures_left:
                self.failures_left -= 1
                return web.Response(status=503)
            return web.Response(status=200 if self.healthy else 503)

        app = web.Application()
        app.router.add_get("/health", health)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await self.kill()
            await runner.cleanup()

    async def start(self, mode: str = "plain") -> int:
        """Start the process; it has claimed its place when this returns. Its pid."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            str(self._folder),
            mode,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert (await self.process.stdout.readline()).strip() == b"claimed"
        self.healthy = True
        return self.process.pid

    async def tell(self, word: str) -> None:
        """Have the process do the thing that its mode is about."""
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        await self.process.stdin.drain()

    async def kill_front_end(self) -> None:
        """SIGKILL to the first process alone; what it has started lives on."""
        assert self.process is not None
        self.healthy = False
        self.process.kill()
        await self.process.wait()

    async def kill(self) -> None:
        """SIGKILL to all of it that lives."""
        process, self.process = self.process, None
        self.healthy = False
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


def main(folder: str, mode: str) -> None:
    """Be the engine."""
    place = claim_ticket(Path(folder))
    if mode == "core":
        multiprocessing.get_context("fork").Process(target=core, args=(place,)).start()
        time.sleep(60)
    rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) if mode == "rank" else None
    let_go = hold(place) if mode == "lifeline" else None
    publish(place)
    print("claimed", flush=True)
    for line in sys.stdin:
        if let_go is not None:
            let_go.set()
        elif line.strip() == "helper":
            subprocess.run([sys.executable, "-c", "import time; time.sleep(0.6)"], check=True)
        elif rank is not None:
            rank.kill()
    time.sleep(60)


def hold(place: dict[str, str]) -> threading.Event:
    """Hold a lifeline until the event is set; it is held when this returns."""
    held, let_go = threading.Event(), threading.Event()

    def thread() -> None:
        take_cell(lifeline_of(Path(place["MIDSTREAM_ARENA"])), "core")
        held.set()
        let_go.wait()
        # Of this thread alone. It never comes back to Python, which would end in another way.
        ctypes.CDLL(None).syscall(EXIT[os.uname().machine], 0)

    threading.Thread(target=thread, daemon=True).start()
    assert held.wait(10)
    return let_go


def core(place: dict[str, str]) -> None:
    """Be the core of an engine whose front end is another process."""
    hold(place)
    publish(place)
    print("claimed", flush=True)
    # The pipes are the front end's, whose end must be seen by them.
    for number in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    time.sleep(60)


def publish(place: dict[str, str]) -> None:
    """What an engine's plugin says of it, in the arena of its place."""
    pool = f"{place['MIDSTREAM_WORKER']}/{place['MIDSTREAM_EPOCH']}/0"
    facts = {"engine": "vllm", "pid": os.getpid(), **told_processes(), "key": KEY, "pools": [pool]}
    with closing(ArenaWriter.open(place["MIDSTREAM_ARENA"])) as arena:
        arena.publish({**facts, "adopted": "MIDSTREAM_ADOPT" in place})


if __name__ == "__main__":
    main(*sys.argv[1:])
