"""The mover's client in the daemon's own event loop: a connection that is lost just when something is asked."""

import asyncio
import json
from pathlib import Path
from typing import Any

import uvloop

from midstream.sidecar.mover.client import MoverClient


def test_a_connection_that_was_lost_unnoticed_is_made_again(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps({"id": json.loads(line)["id"], "ok": True, "told": 1}).encode() + b"\n")
        writer.close()

    async def ask_twice() -> list[dict[str, Any]]:
        server = await asyncio.start_unix_server(answer, tmp_path / "mover.sock")
        client = MoverClient(tmp_path / "mover.sock")
        told = [await client.status()]
        assert client._writer is not None
        client._writer.transport.abort()
        told.append(await client.status())
        await client.close()
        server.close()
        return told

    assert uvloop.run(ask_twice()) == [{"told": 1}, {"told": 1}]
