"""An engine is hung when sessions decode there and nothing is journaled; never when it merely has nothing to say."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from midstream.session.arena import ArenaReader, LoadState, create_arena
from midstream.session.arena_writer import ArenaWriter, SlotWriter
from midstream.session.ids import SessionId
from midstream.sidecar.hang import is_deaf, is_hung, progress
from midstream.sidecar.workers import Epoch

A, B = SessionId("a" * 32), SessionId("b" * 32)
WATCH_S = 0.05


class Engine:
    """An epoch and its writer."""

    def __init__(self, folder: Path) -> None:
        path = folder / "1.arena"
        create_arena(path, slot_count=4, page_count=16)
        self.writer = ArenaWriter.open(path)
        self.epoch = Epoch("w0", 1, path, arena=ArenaReader(path))

    def session(self, session: SessionId, *, outputs: tuple[int, ...] = (), own: tuple[int, ...] = ()) -> SlotWriter:
        slot = self.writer.admit(session, 1, 5, "0" * 32, outputs)
        assert slot is not None
        slot.append_tokens(own)
        return slot


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.writer.close()


async def test_sessions_that_decode_without_a_token_are_a_hang(engine: Engine) -> None:
    engine.session(A, own=(1, 2))
    engine.session(B)
    assert await is_hung(engine.epoch, WATCH_S)


async def test_one_token_of_any_session_is_life(engine: Engine) -> None:
    engine.session(A, own=(1, 2))
    other = engine.session(B, own=(1,))
    asyncio.get_running_loop().call_later(WATCH_S / 2, other.append_tokens, [2])
    assert not await is_hung(engine.epoch, WATCH_S)


async def test_a_session_that_ends_meanwhile_is_life(engine: Engine) -> None:
    slot = engine.session(A, own=(1, 2))
    asyncio.get_running_loop().call_later(WATCH_S / 2, slot.finish, "stop")
    assert not await is_hung(engine.epoch, WATCH_S)


async def test_a_prefill_is_no_hang(engine: Engine) -> None:
    engine.session(A)
    assert not await is_hung(engine.epoch, WATCH_S)


async def test_a_resumed_session_that_waits_for_its_kv_or_computes_it_again_is_no_hang(engine: Engine) -> None:
    slot = engine.session(A, outputs=(1, 2, 3))
    slot.report(LoadState.WAITING, 0, 0)
    assert progress(engine.epoch) == (0, 0)
    assert not await is_hung(engine.epoch, WATCH_S)
    slot.append_tokens([4])
    assert await is_hung(engine.epoch, WATCH_S)


async def test_a_dead_engine_is_not_hung(engine: Engine) -> None:
    engine.session(A, own=(1,))
    asyncio.get_running_loop().call_later(WATCH_S / 2, setattr, engine.epoch, "dead", True)
    assert not await is_hung(engine.epoch, WATCH_S)


async def test_an_engine_without_an_arena_is_never_called_hung() -> None:
    assert not await is_hung(Epoch("w0", 1, None), 0.0)


async def test_an_engine_that_takes_connections_and_answers_nothing_is_deaf() -> None:
    leaving = asyncio.Event()

    async def say_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await leaving.wait()
        writer.close()

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        assert await is_deaf(url_of(silent), WATCH_S)
        leaving.set()
    async with await asyncio.start_server(fail, "127.0.0.1", 0) as unwell:
        assert not await is_deaf(url_of(unwell), 10.0)
        gone = url_of(unwell)
    assert not await is_deaf(gone, 10.0), "nobody is there: that is no silence"


def url_of(server: asyncio.Server) -> str:
    return "http://{}:{}".format(*server.sockets[0].getsockname())
