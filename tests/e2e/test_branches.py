"""Going back: a session's earlier tokens as the beginning of another one, by the command that people use."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support.sidecars import Sidecar

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

SAMPLED: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 240,
    "temperature": 0.8,
    "return_token_ids": True,
}
STORING: dict[str, object] = {"store.snapshot_every_s": 0.1, "store.tail_every_tokens": 8}


async def midstream(sidecar: Sidecar, *words: str) -> tuple[int, str, str]:
    """Run the command beside a sidecar: exit status, output, errors."""
    argv = [sys.executable, "-m", "midstream.sidecar.cli", *words, "--state-dir", str(sidecar.process.state_dir)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=90)
    return done.returncode, done.stdout, done.stderr


def ids_of(stream: str) -> list[int]:
    """The token ids of a stream as it was printed."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return [i for chunk in chunks for choice in chunk.get("choices", []) for i in choice.get("token_ids") or ()]


async def test_a_branch_of_a_running_session_and_one_of_its_snapshot_go_on_as_it_did(
    start: Callable[..., Sidecar], http: aiohttp.ClientSession, tmp_path: Path
) -> None:
    sidecar = await asyncio.to_thread(start, store=tmp_path, settings=STORING)
    answering = asyncio.create_task(sidecar.stream(http, SAMPLED))
    async with asyncio.timeout(30), ControlClient(sidecar.process.state_dir) as control:
        while not (there := [s for s in await sidecar.sessions(http) if s["state"] == "running"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        session = SessionId(there[0]["session"])
        # Not by the command: it takes longer to start than the session to end.
        await control.move(session, at=10)
        branch = b"".join([piece async for piece in control.fork(session, 8, {"max_tokens": 30})])
    wanted = await answering
    assert ids_of(branch.decode()) == list(wanted.token_ids[:30])
    # Its seed was drawn by the sidecar; a branch without changes goes on with the same one.
    status, live, errors = await midstream(sidecar, "sessions", "fork", session, "--at", "20")
    assert status == 0, errors
    assert ids_of(live) == list(wanted.token_ids)
    status, other, errors = await midstream(
        sidecar, "sessions", "fork", session, "--at", "20", "--set", "seed=99", "--set", "max_tokens=60"
    )
    assert status == 0, errors
    assert ids_of(other)[:20] == list(wanted.token_ids[:20])
    assert len(ids_of(other)) == 60
    assert ids_of(other) != list(wanted.token_ids[:60])
    told = await sidecar.sessions(http)
    moved = next(s for s in told if s["session"] == session)["outcomes"]
    assert [(o["reason"], o["outcome"], o["tier"]) for o in moved] == [("move", "exact", "held")]
    branches = [s for s in told if s.get("parent") == session]
    assert len(branches) == 3
    for branch in branches:
        (came_to,) = branch["outcomes"]
        assert (came_to["reason"], came_to["outcome"], came_to["tokens_recomputed"]) == ("fork", "exact", 1)
        assert came_to["cut"] in (8, 20)
    status, found, _ = await midstream_store(tmp_path, "diff", session, branches[1]["session"], "--json")
    assert status == 0
    assert json.loads(found)["same_prompt"]
    assert json.loads(found)["first_other_output"] == 0


async def midstream_store(store: Path, *words: str) -> tuple[int, str, str]:
    """Run `midstream snapshots` on a store."""
    argv = [sys.executable, "-m", "midstream.sidecar.cli", "snapshots", *words, "--store-dir", str(store)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


async def test_what_cannot_be_branched_off_is_said_in_words_and_harms_nothing(sidecar: Sidecar) -> None:
    status, output, errors = await midstream(sidecar, "sessions", "fork", "ab" * 16, "--at", "5")
    assert (status, output) == (3, "")
    assert "is not in flight" in errors
    status, _, errors = await midstream(sidecar, "sessions", "fork", "ab", "--at", "5")
    assert status == 2
    status, _, errors = await midstream(sidecar, "sessions", "fork", "ab" * 16, "--at", "5", "--set", "temperature=hot")
    assert status == 2
    assert "is not JSON" in errors
