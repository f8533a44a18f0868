"""A gateway as users run it, in front of sidecars that are nodes of its fleet."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from midstream.loadtest.client import Answer, read_stream, read_whole
from support.sidecars import CHAT, COMPLETIONS, MODEL, REPORT, Sidecar, until

START_S = 90.0


class Fleet:
    """Nodes with one secret, and a gateway in front of them."""

    def __init__(
        self, folder: Path, command: Sequence[str], *, nodes: int = 2, workers: int = 1, **options: Any
    ) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        self.secret.write_text(secrets.token_hex(32))
        self.secret.chmod(0o600)
        settings = options.pop("settings", {})
        of_each = options.pop("of_each", lambda name: {})
        self.nodes = {
            f"node-{index}": Sidecar(
                command,
                workers=workers,
                settings={"fleet.secret_file": str(self.secret), "fleet.name": f"node-{index}", **settings}
                | of_each(f"node-{index}"),
                **options,
            )
            for index in range(nodes)
        }
        self.log = folder / "gateway.log"
        self.url = ""
        self.gateway_settings: Mapping[str, object] = {}
        self._gateway: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start all of it, and wait until the gateway has all nodes."""
        await asyncio.gather(*(asyncio.to_thread(node.start) for node in self.nodes.values()))
        await self.start_gateway()

    async def start_gateway(self, *, secret: Path | None = None, without: Sequence[str] = ()) -> None:
        """Start the gateway, and wait until it has all nodes; one with another `secret` has none of them."""
        self.url, self.log = "", self.folder / f"gateway-{secrets.token_hex(4)}.log"
        named = [word for name, node in self.nodes.items() for word in ("--node", f"{name}={node.url}")]
        sets = [word for key, value in self.gateway_settings.items() for word in ("--set", f"{key}={value}")]
        argv = [
            sys.executable, "-m", "midstream.sidecar.cli", "gateway", *named, "--port", "0",
            "--secret-file", str(secret or self.secret), *sets,
        ]  # fmt: skip
        with self.log.open("ab") as sink:
            self._gateway = subprocess.Popen(argv, stdout=sink, stderr=sink, env=dict(os.environ))  # noqa: ASYNC220
        deadline_s = time.monotonic() + START_S
        async with aiohttp.ClientSession() as http:
            wanted = {"ready"} if secret is None else {"lost"}
            while {state for name, state in (await self.readiness(http)).items() if name not in without} != wanted:
                assert time.monotonic() < deadline_s, self.log.read_text()
                await asyncio.sleep(0.05)

    async def readiness(self, http: aiohttp.ClientSession) -> dict[str, str]:
        """What the gateway holds of each node; nothing while it is not up."""
        if not self.url:
            lines = [line for line in self.log.read_text().splitlines() if "event=listening url=" in line]
            if not lines:
                return {}
            self.url = lines[0].split("event=listening url=")[1].split()[0]
        return {node["name"]: node["readiness"] for node in (await self.status(http))["nodes"]}

    async def status(self, http: aiohttp.ClientSession) -> dict[str, Any]:
        """`/midstream/v1/status` of the gateway."""
        async with http.get(f"{self.url}/midstream/v1/status") as answer:
            return await answer.json()  # type: ignore[no-any-return]

    async def sessions(self, http: aiohttp.ClientSession) -> list[dict[str, Any]]:
        """Sessions of the gateway, newest last."""
        async with http.get(f"{self.url}/midstream/v1/sessions") as answer:
            return (await answer.json())["sessions"]  # type: ignore[no-any-return]

    async def serving(self, http: aiohttp.ClientSession) -> str:
        """The one node that has sessions."""
        [name] = {s["node"] for s in await self.sessions(http) if s["state"] == "running"}
        return str(name)

    async def stream(
        self,
        http: aiohttp.ClientSession,
        body: dict[str, Any],
        on_tokens: Callable[[Answer], Any] | None = None,
        **headers: str,
    ) -> Answer:
        """A streamed answer through the gateway."""
        path = CHAT if "messages" in body else COMPLETIONS
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        asked = {"model": MODEL, **body}
        return await read_stream(http, self.url + path, asked, headers={**REPORT, **more}, on_tokens=on_tokens)

    async def whole(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
        """An answer in one piece through the gateway."""
        return await read_whole(http, self.url + COMPLETIONS, {"model": MODEL, **body}, headers=REPORT)

    async def state(self, http: aiohttp.ClientSession, name: str) -> str:
        """How a node is, as the gateway has it."""
        return next(n["readiness"] for n in (await self.status(http))["nodes"] if n["name"] == name)

    async def until_state(self, http: aiohttp.ClientSession, name: str, *states: str, limit_s: float = 30.0) -> float:
        """Wait until a node is in one of these states for the gateway, and return how long that took."""

        async def reached(http: aiohttp.ClientSession) -> bool:
            return await self.state(http, name) in states

        return await until(reached, http, limit_s)

    async def whole_again(self, http: aiohttp.ClientSession, nodes_min: int) -> None:
        """Start what was lost where fewer nodes than that are left, and wait until the gateway has all that run."""
        lost = [name for name, node in self.nodes.items() if not _runs(node)]
        if len(self.nodes) - len(lost) < nodes_min:
            await asyncio.gather(*(asyncio.to_thread(self.nodes[name].start) for name in lost))
            lost = []
        if self._gateway is None or self._gateway.poll() is not None:
            await self.start_gateway(without=lost)
        for name in self.nodes:
            if name not in lost:
                await self.until_state(http, name, "ready")

    def lose(self, name: str) -> None:
        """SIGKILL to all of a node at once: its sidecar and everything that it has started."""
        self._signal(name, signal.SIGKILL)
        process = self.nodes[name].process.process
        assert process is not None
        process.wait(10)

    def freeze(self, name: str) -> None:
        """SIGSTOP to all of a node: it is there, and says nothing."""
        self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT to all of it."""
        self._signal(name, signal.SIGCONT)

    def end(self, name: str) -> None:
        """SIGTERM to a node's sidecar: it drains."""
        os.kill(self.nodes[name].pid, signal.SIGTERM)

    def lose_gateway(self) -> None:
        """SIGKILL to the gateway."""
        assert self._gateway is not None
        self._gateway.kill()
        self._gateway.wait(10)

    def _signal(self, name: str, number: signal.Signals) -> None:
        root = psutil.Process(self.nodes[name].pid)
        holders = [p for p in self.nodes[name].holders() if p.pid != root.pid]
        for process in (root, *root.children(recursive=True), *holders):
            if process.is_running():
                process.send_signal(number)

    def stop(self) -> None:
        """End all of it."""
        if self._gateway is not None:
            self._gateway.kill()
            self._gateway.wait(10)
        # In good order it would take each engine's time to end.
        for name, node in self.nodes.items():
            if _runs(node):
                self.lose(name)
            node.stop()


def _runs(node: Sidecar) -> bool:
    return node.process.process is not None and node.process.process.poll() is None


@contextmanager
def fleets(folder: Path, command: Sequence[str]) -> Iterator[Callable[..., Fleet]]:
    """A way to make fleets, all of which are ended."""
    made: list[Fleet] = []

    def make(**options: Any) -> Fleet:
        place = folder / f"fleet-{len(made)}"
        place.mkdir()
        made.append(Fleet(place, command, **options))
        return made[-1]

    try:
        yield make
    finally:
        for fleet in made:
            fleet.stop()
