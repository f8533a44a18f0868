"""How much all kept streams may take together."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.stream_kept import KeptStream, Phase
from midstream.proxy.stream_room import Room

TOKEN = "AAECAwQFBgcICQoLDA0ODw"


def nothing_to_drop() -> bool:
    return False


def stream_in(room: Room) -> KeptStream:
    stream = KeptStream(TOKEN, b"key", b"digest", room)
    stream.phase = Phase.OPEN
    return stream


class Reading:
    """A reader that takes as much as a test lets it."""

    def __init__(self, *, quick: bool = True) -> None:
        self.position = 0
        self.quick = quick
        self.got = b""
        self.woken = self.replaced = 0

    def takes_now(self, size_bytes: int) -> bool:
        return self.quick

    async def write(self, data: bytes) -> None:
        self.got += data

    def wake(self) -> None:
        self.woken += 1

    def replace(self) -> None:
        self.replaced += 1


def event(size: int) -> bytes:
    return b"data: " + b"x" * size + b"\n\n"


async def blocks(work: "asyncio.Task[None]") -> bool:
    await asyncio.sleep(0.01)
    return not work.done()


async def test_a_stream_that_is_read_never_waits_and_keeps_its_share() -> None:
    room = Room(10_000, 4_000, nothing_to_drop)
    room.share_among(2)
    stream, reader = stream_in(room), Reading()
    stream.attach(reader)
    for _ in range(100):
        await asyncio.wait_for(stream.write(event(500)), 1)
        assert stream.log.size_bytes == room.held_bytes <= room.share_bytes == 2_000
    assert reader.got.count(b"data:") == stream.log.last == 100


async def test_a_stream_that_is_read_keeps_nothing_where_others_have_all_the_room() -> None:
    room = Room(3_000, 4_000, nothing_to_drop)
    room.take(3_000)
    stream, reader = stream_in(room), Reading()
    stream.attach(reader)
    await asyncio.wait_for(stream.write(event(500)), 1)
    assert stream.log.size_bytes == 0
    assert room.held_bytes == 3_000
    assert not stream.log.has_after(0)
    assert stream.log.has_after(1)


async def test_an_event_larger_than_all_the_room_still_goes_through_to_a_reader() -> None:
    room = Room(1_000, 1_000, nothing_to_drop)
    stream, reader = stream_in(room), Reading()
    work = asyncio.create_task(stream.write(event(5_000)))
    assert await blocks(work)
    stream.attach(reader)
    await asyncio.wait_for(work, 1)
    assert len(reader.got) > 5_000
    assert room.held_bytes == 0


async def test_a_slow_reader_holds_its_session_up_only_when_the_log_is_full() -> None:
    room = Room(100_000, 2_000, nothing_to_drop)
    stream, reader = stream_in(room), Reading(quick=False)
    stream.attach(reader)
    work = asyncio.create_task(asyncio.sleep(0))
    for _ in range(10):
        work = asyncio.create_task(stream.write(event(500)))
        if await blocks(work):
            break
    assert stream.log.last == 3
    assert reader.woken == 3
    _, reader.position = stream.log.after(0, 1_200)
    stream.look_again()
    await asyncio.wait_for(work, 1)
    assert stream.log.has_after(reader.position)


async def test_what_waits_for_room_goes_on_when_others_leave_some() -> None:
    room = Room(2_000, 4_000, nothing_to_drop)
    other, stream = stream_in(room), stream_in(room)
    await other.write(event(1_500))
    work = asyncio.create_task(stream.write(event(1_000)))
    assert await blocks(work)
    other.give_up()
    await asyncio.wait_for(work, 1)
    assert room.held_bytes == stream.log.size_bytes


async def test_what_waits_for_room_can_be_given_up() -> None:
    room = Room(1_000, 1_000, nothing_to_drop)
    stream = stream_in(room)
    stream.task = work = asyncio.create_task(stream.write(event(5_000)))
    assert await blocks(work)
    stream.give_up()
    await asyncio.gather(work, return_exceptions=True)
    assert work.cancelled()
    assert room.held_bytes == 0


async def test_what_is_needed_less_goes_before_anybody_waits() -> None:
    dropped: list[int] = []

    def drop() -> bool:
        if len(dropped) == 2:
            return False
        dropped.append(1)
        room.give(1_000)
        return True

    room = Room(2_000, 4_000, drop)
    room.take(2_000)
    stream = stream_in(room)
    await asyncio.wait_for(stream.write(event(1_500)), 1)
    assert len(dropped) == 2
    work = asyncio.create_task(stream.write(event(1_500)))
    assert await blocks(work)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), max_size=60))
async def test_whatever_streams_say_and_readers_do_the_count_is_right_and_the_bound_holds(
    steps: list[tuple[int, int]],
) -> None:
    room = Room(4_000, 2_500, nothing_to_drop)
    room.share_among(3)
    streams = [stream_in(room) for _ in range(3)]
    working: dict[int, asyncio.Task[None]] = {}
    for what, amount in steps:
        n = amount % 3
        stream = streams[n]
        match what:
            case 0 if n not in working or working[n].done():
                working[n] = asyncio.create_task(stream.write(event(amount)))
            case 1:
                reader = Reading()
                _, reader.position = stream.log.after(stream.log.first - 1, 1 << 20)
                stream.attach(reader)
            case 2 if isinstance(stream.reader, Reading):
                stream.detach(stream.reader)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert room.held_bytes == sum(one.log.size_bytes for one in streams)
        assert room.held_bytes <= 4_000
        assert all(one.log.size_bytes <= 2_500 for one in streams)
    for stream in streams:
        stream.give_up()
    for work in working.values():
        work.cancel()
    await asyncio.gather(*working.values(), return_exceptions=True)
    assert room.held_bytes == 0
