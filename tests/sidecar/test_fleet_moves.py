"""What a node does for gateways that empty it: by real requests, over arenas that tests write."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from midstream.session.errors import Refused
from midstream.sidecar.drain.here import Here
from midstream.sidecar.drain.room import Rooms
from midstream.sidecar.drain.saving import Saving
from midstream.sidecar.fleet.proof import SecretBeliever, SecretProver
from midstream.sidecar.fleet_api import BODY_BYTES_MAX, SESSION_PATH, proving
from midstream.sidecar.fleet_moves import ROOM_PATH, SAVE, move_routes
from midstream.sidecar.mover.protocol import StoredResult
from support.coordinating import HASH, PROMPT_LEN, Engine, Rig, S, asked, covering, running

SECRET = b"of this fleet, and of no other 0"
TO = "peer://127.0.0.1:1"


class Node:
    """One node's paths, and what it brings elsewhere."""

    def __init__(self, rig: Rig, engine: Engine, sizes: tuple[int, int] | None, *, brings: bool) -> None:
        self.rig = rig
        self.engine = engine
        self.brought: list[tuple[str, str]] = []
        self.there: dict[str, Any] | Refused = {"generation": 1, "kv_len": PROMPT_LEN + 2, "size_bytes": 77}
        here = Here(rig.workers, rig.coordinator, lambda pool: sizes, 8)
        saving = Saving(rig.coordinator, self._bring if brings else None)
        self.app = web.Application()
        self.app.add_routes(move_routes(proving(SecretBeliever(SECRET)), here, Rooms(), saving))
        self.url = ""
        self._prover = SecretProver(SECRET)

    async def _bring(self, session: str, to: str, within_s: float) -> dict[str, Any]:
        self.brought.append((session, to))
        if isinstance(self.there, Refused):
            raise self.there
        return self.there

    async def ask(self, method: str, path: str, body: Any = None, **proof: str) -> tuple[int, dict[str, Any]]:
        """Status and answer; `proof` in place of a good one."""
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = proof or self._prover.headers(method, path, raw)
        async with (
            aiohttp.ClientSession() as http,
            http.request(method, self.url + path, data=raw or None, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    def proof_of(self, method: str, path: str, body: bytes) -> dict[str, str]:
        return dict(self._prover.headers(method, path, body))


@asynccontextmanager
async def node(folder: Path, *, sizes: tuple[int, int] | None = None, brings: bool = True) -> AsyncIterator[Node]:
    """A node with a session that has written three tokens."""
    rig = Rig(folder, stores=True)
    engine, _ = await running(rig, 10, 20, 30)
    rig.mover.found = covering(3)
    made = Node(rig, engine, sizes, brings=brings)
    runner = web.AppRunner(made.app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield made
    finally:
        await runner.cleanup()


SAVE_PATH = SESSION_PATH + S + SAVE
HOLD_PATH = ROOM_PATH + S


async def test_who_proves_nothing_gets_nothing(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        body = {"to": TO}
        for method, path in (("GET", SESSION_PATH.rstrip("/")), ("POST", SAVE_PATH), ("PUT", HOLD_PATH)):
            status, told = await sidecar.ask(method, path, body, Nothing="x")
            assert (status, S in json.dumps(told)) == (401, False)
        # A proof is of one body, and holds once.
        other = sidecar.proof_of("POST", SAVE_PATH, b'{"to":"peer://elsewhere:1"}')
        assert (await sidecar.ask("POST", SAVE_PATH, body, **other))[0] == 401
        once = sidecar.proof_of("POST", SAVE_PATH, json.dumps(body).encode())
        assert (await sidecar.ask("POST", SAVE_PATH, body, **once))[0] == 200
        assert (await sidecar.ask("POST", SAVE_PATH, body, **once))[0] == 401
        assert len(sidecar.brought) == 1


async def test_what_could_leave_is_told_with_what_it_would_cost(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        status, told = await sidecar.ask("GET", SESSION_PATH.rstrip("/"))
        assert status == 200
        key = sidecar.engine.epoch.key
        assert key is not None
        [session] = told["sessions"]
        assert session == {
            "session": S, "positions": PROMPT_LEN + 3, "outputs": 3, "left_s": None, "key": key.digest()
        }  # fmt: skip


async def test_a_session_is_saved_with_the_outputs_that_its_snapshot_covers(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        # Another token is written while it is being saved: nobody counts on that.
        assert sidecar.engine.newest is not None
        sidecar.engine.newest.append_tokens([40])
        status, told = await sidecar.ask("POST", SAVE_PATH, {"to": TO, "last": True})
        assert (status, told["outputs"], told["kv_len"], told["size_bytes"]) == (200, [10, 20, 30], PROMPT_LEN + 2, 77)
        assert sidecar.brought == [(S, TO)]
        sidecar.rig.coordinator.draining = True
        sidecar.rig.coordinator.ended(asked(), "cancelled")
        assert (await sidecar.rig.coordinator.take_in(asked(), (10, 20, 30))).worker == "w0"


async def test_what_is_there_and_older_than_what_was_saved_is_no_save(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        for there in ({"generation": 1, "kv_len": PROMPT_LEN + 1}, {"generation": 0, "kv_len": 999}):
            sidecar.there = {**there, "size_bytes": 7}
            status, told = await sidecar.ask("POST", SAVE_PATH, {"to": TO})
            assert (status, told["error"]["code"]) == (503, "replaced")
        # Nor is what a process of another version answers.
        for odd in ({}, {"generation": None, "kv_len": None, "size_bytes": 7}):
            sidecar.there = odd
            status, told = await sidecar.ask("POST", SAVE_PATH, {"to": TO})
            assert (status, told["error"]["code"]) == (503, "bad_answer")
        sidecar.there = Refused("replica_full", "it is full")
        assert (await sidecar.ask("POST", SAVE_PATH, {"to": TO}))[1]["error"]["code"] == "replica_full"


async def test_a_snapshot_of_an_owner_before_is_no_save(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        sidecar.rig.mover.found = StoredResult(True, 7, PROMPT_LEN, HASH, PROMPT_LEN + 2, 3)
        status, told = await sidecar.ask("POST", SAVE_PATH, {"to": TO})
        assert (status, told["error"]["code"]) == (409, "busy")


async def test_a_session_that_has_come_to_its_end_is_not_given_away(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        sidecar.engine.finish("stop")
        for to in (TO, ""):
            status, told = await sidecar.ask("POST", SAVE_PATH, {"to": to})
            assert (status, told["error"]["code"]) == (409, "ended")


async def test_without_a_place_to_save_it_only_its_outputs_are_told(tmp_path: Path) -> None:
    async with node(tmp_path, brings=False) as sidecar:
        status, told = await sidecar.ask("POST", SAVE_PATH, {"to": ""})
        assert (status, told["outputs"], told["kv_len"]) == (200, [10, 20, 30], 0)
        status, told = await sidecar.ask("POST", SAVE_PATH, {"to": TO})
        assert (status, told["error"]["code"]) == (422, "no_replicas")


async def test_room_is_held_where_places_and_memory_are_free(tmp_path: Path) -> None:
    async with node(tmp_path, sizes=(8, 16)) as sidecar:
        [worker] = sidecar.rig.workers.ready()
        assert worker.current is not None
        assert worker.current.key is not None
        order = {"tokens": 64, "keys": [worker.current.key.digest()]}
        other = ROOM_PATH + "6" * 32
        # Three of eight blocks are in use.
        assert await sidecar.ask("PUT", other, {**order, "tokens": 81}) == (
            507, {"error": {"code": "no_room", "message": "7 places and KV for 80 positions are free here, and 81 are "
                            "wanted; choose another node"}})  # fmt: skip
        assert (await sidecar.ask("PUT", other, order))[0] == 200
        assert (await sidecar.ask("PUT", ROOM_PATH + "7" * 32, order))[0] == 507
        assert (await sidecar.ask("DELETE", other))[0] == 200
        assert (await sidecar.ask("PUT", ROOM_PATH + "7" * 32, order))[0] == 200
        assert (await sidecar.ask("PUT", other, {**order, "keys": ["x"]}))[0] == 422


async def test_orders_that_cannot_be_read_are_refused_in_words(tmp_path: Path) -> None:
    async with node(tmp_path) as sidecar:
        for body in (b"", b"{}", b"[1]", b'{"to": 1}', b'{"to": "", "more": 1}', b"[" * 50_000 + b"]" * 50_000):
            status, told = await sidecar.ask("POST", SAVE_PATH, body)
            assert (status, told["error"]["code"]) == (400, "bad_request"), body[:20]
        assert (await sidecar.ask("POST", SESSION_PATH + "nobody" + SAVE, {"to": ""}))[0] == 400
        assert (await sidecar.ask("POST", SESSION_PATH + "9" * 32 + SAVE, {"to": ""}))[0] == 404
        assert (await sidecar.ask("POST", SAVE_PATH, b"x" * (BODY_BYTES_MAX + 1)))[0] == 401
