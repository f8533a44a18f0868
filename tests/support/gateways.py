"""A gateway as users run it, in front of sidecars that are nodes of its fleet."""

import asyncio
import os
import secrets
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
from support.sidecars import CHAT, COMPLETIONS, MODEL, REPORT, Sidecar

START_S = 30.0


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
        self.nodes = {
            f"node-{index}": Sidecar(
                command,
                workers=workers,
                settings={"fleet.secret_file": str(self.secret), "fleet.name": f"node-{index}", **settings},
                **options,
            )
            for index in range(nodes)
        }
        self.log = folder / "gateway.log"
        self.url = ""
        self._gateway: subprocess.Popen[bytes] | None = None

    async def start(self, settings: Mapping[str, object] | None = None) -> None:
        """Start all of it, and wait until the gateway has all nodes."""
        await asyncio.gather(*(asyncio.to_thread(node.start) for node in self.nodes.values()))
        named = [word for name, node in self.nodes.items() for word in ("--node", f"{name}={node.url}")]
        sets = [word for key, value in (settings or {}).items() for word in ("--set", f"{key}={value}")]
        argv = [
            sys.executable, "-m", "midstream.sidecar.cli", "gateway", *named, "--port", "0",
            "--secret-file", str(self.secret), *sets,
        ]  # fmt: skip
        with self.log.open("ab") as sink:
            self._gateway = subprocess.Popen(argv, stdout=sink, stderr=sink, env=dict(os.environ))  # noqa: ASYNC220
        deadline_s = time.monotonic() + START_S
        async with aiohttp.ClientSession() as http:
            while set(await self.readiness(http)) != {"ready"}:
                assert time.monotonic() < deadline_s, self.log.read_text()
                await asyncio.sleep(0.05)

    async def readiness(self, http: aiohttp.ClientSession) -> list[str]:
        """What the gateway holds of each node; nothing while it is not up."""
        if not self.url:
            lines = [line for line in self.log.read_text().splitlines() if "event=listening url=" in line]
            if not lines:
                return []
            self.url = lines[0].split("event=listening url=")[1].split()[0]
        return [node["readiness"] for node in (await self.status(http))["nodes"]]

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
        return await read_whole(http, self.url + COMPLETIONS, {"model": MODEL, **body})

    def lose(self, name: str) -> None:
        """SIGKILL to all of a node at once: its sidecar and everything that it has started."""
        root = psutil.Process(self.nodes[name].pid)
        holders = [p for p in self.nodes[name].holders() if p.pid != root.pid]
        for process in (root, *root.children(recursive=True), *holders):
            if process.is_running():
                process.kill()

    def stop(self) -> None:
        """End all of it."""
        if self._gateway is not None:
            self._gateway.kill()
            self._gateway.wait(10)
        for node in self.nodes.values():
            node.stop()


@contextmanager
def fleets(folder: Path, command: Sequence[str]) -> Iterator[Callable[..., Fleet]]:
    """A way to make fleets, all of which are ended."""
    made: list[Fleet] = []

    def make(**options: Any) -> Fleet:
        place = folder / f"fleet-{len(made)}"
        place.mkdir()
        made.append(Fleet(place, command, **options))
        return made[-1]

    yield make
    for fleet in made:
        fleet.stop()
