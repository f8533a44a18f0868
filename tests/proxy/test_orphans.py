"""What one gateway makes of a node's events another makes of them, too, whatever came together on the way."""

import random
from dataclasses import replace

import pytest

from midstream.proxy.dialects.hiding import Hiding
from midstream.proxy.orphans import KeptPart, Origin, origin_from, origin_in, part_from, with_origin
from midstream.proxy.splice import Splicer, Wishes
from midstream.proxy.sse import SseParser
from midstream.proxy.stream_kept import KeptStream
from midstream.proxy.stream_room import Room
from midstream.proxy.waiting import COMMENT
from midstream.session.ids import SessionId
from support.answers import Answer, Voice

TOKEN = "00112233445566ff~" + "A" * 22
ORIGIN = Origin(TOKEN, "0" * 32, "gateway.10s.00112233445566ff", "1.0")
SESSION = SessionId("5" * 32)
ANSWER = Answer((*Answer.words(40).pieces, *(bytes([byte]) for byte in "🦀 é: waiting\n\n!".encode())))


def stream_of(*, chat: bool, usage: bool) -> list[bytes]:
    """The events of a node, each by itself."""
    voice = Voice(
        ANSWER, chat=chat, wants_ids=True, wants_usage=usage, stops=(), id="cmpl-a", created=1700000000, model="tiny"
    )
    count = len(ANSWER.pieces)
    events = [voice.role()] if chat else []
    events += [voice.tokens(i, i + 1, first=i == 0, finish=None) for i in range(count)]
    events += [b": an engine's own word\n\n", voice.tokens(count, count, first=False, finish="length")]
    events += [voice.usage(count)] if usage else []
    return [*events, b"data: [DONE]\n\n"]


async def numbered(pieces: list[bytes], wishes: Wishes) -> bytes:
    """What a gateway keeps of it, and sends."""
    stream = KeptStream(TOKEN, b"key", b"digest", Room(1 << 20, 1 << 20, lambda: False))
    splicer, parser = Splicer(wishes), SseParser()
    assert splicer.begin() is None
    for piece in pieces:
        step = splicer.feed(parser.feed(piece))
        if step.out:
            await stream.write(step.out)
    return stream.log.after(0, 1 << 30)[0]


def cut(events: list[bytes], draw: random.Random, *, waits: bool) -> list[bytes]:
    """The same events as they may arrive: cut anywhere, and with comments that bridge a wait between them."""
    whole = b""
    for event in events:
        whole += (COMMENT if waits and draw.random() < 0.2 else b"") + event
    cuts = sorted(draw.sample(range(1, len(whole)), draw.randrange(1, 60)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("hiding", [None, Hiding.NULL])
async def test_a_stream_is_made_of_its_events_alone(chat: bool, usage: bool, hiding: Hiding | None) -> None:
    events = stream_of(chat=chat, usage=usage)
    wishes = Wishes(chat=chat, hiding=hiding, usage=usage)
    said = await numbered(events, wishes)
    assert said.count(b"\nid: ") == len([e for e in said.split(b"\n\n") if e])
    for seed in range(40):
        draw = random.Random(seed)
        assert await numbered(cut(events, draw, waits=seed % 2 == 1), wishes) == said, f"seed {seed}"


async def test_what_its_client_has_is_counted_once_more_and_not_sent() -> None:
    class Reader:
        position = 7
        woken = 0
        got: list[bytes]

        def takes_now(self, size_bytes: int) -> bool:
            return True

        async def write(self, data: bytes) -> None:
            self.got.append(data)

        def wake(self) -> None:
            self.woken += 1

        def replace(self) -> None:
            raise AssertionError

    room = Room(1 << 20, 1 << 16, lambda: False)
    stream = KeptStream(TOKEN, b"key", b"digest", room, behind=7)
    reader = Reader()
    reader.got = []
    stream.attach(reader)
    for i in range(3):
        await stream.write(b"data: %d\n\n" % i)
    # Several at once, some of which are new: those are for the reader to fetch.
    await stream.write(b"".join(b"data: %d\n\n" % i for i in range(3, 9)))
    assert (reader.got, reader.woken) == ([], 1)
    assert stream.log.after(7, 1 << 20) == (
        b"".join(b"data: %d\nid: %b.%d\n\n" % (i, TOKEN.encode(), i + 1) for i in (7, 8)),
        9,
    )
    reader.position = 9
    await stream.write(b"data: 9\n\n")
    assert reader.got == [b"data: 9\nid: %b.10\n\n" % TOKEN.encode()]
    stream.give_up()
    assert room.held_bytes == 0


def test_what_is_told_beside_a_marker_is_read_as_it_was_written() -> None:
    body = with_origin({"prompt": "x", "kv_transfer_params": {"midstream": {"v": 1}}}, replace(ORIGIN, adopts=True))
    assert origin_in(body) == replace(ORIGIN, adopts=True)
    assert body["kv_transfer_params"]["midstream"] == {"v": 1}
    assert origin_in({"prompt": "x"}) is None
    part = KeptPart(ORIGIN, SESSION, 3, 17)
    assert part_from(part.to_json()) == part


@pytest.mark.parametrize(
    "told",
    [
        "text",
        {},
        {**ORIGIN.to_json(), "token": "../../etc"},
        {**ORIGIN.to_json(), "digest": "0" * 31},
        {**ORIGIN.to_json(), "owner": 7},
        {**ORIGIN.to_json(), "code": "1" * 300},
    ],
)
def test_what_is_no_origin_is_refused(told: object) -> None:
    with pytest.raises(ValueError, match="stream"):
        origin_from(told)


@pytest.mark.parametrize(
    "change",
    [{"generation": 0}, {"generation": True}, {"seed": "1"}, {"session": "x"}, {"session": 5}, {"origin": None}],
)
def test_what_is_no_part_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has words of its own
        part_from({**KeptPart(ORIGIN, SESSION, 3, None).to_json(), **change})
