"""What the ids of events promise: whoever was cut off at any byte gets the rest, and nothing twice."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.event_ids import Numbering, is_token, new_token, parse_id, parse_position, prefix_of
from midstream.proxy.sse import SseParser, split_events, with_id
from midstream.proxy.stream_log import StreamLog
from support.answers import Answer, Voice, undisturbed
from support.event_answers import RICH, messages_events, responses_events
from support.reconnecting import position_in, whole_events

TOKEN = new_token(bytes(range(16)))
RECORDED = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parent / "recorded").glob("*.sse"))}


def generated() -> bytes:
    """A stream of `/generate`: all so far in each event."""
    events = [
        {"text": " w" * n, "output_ids": list(range(n)), "meta_info": {"id": "g", "completion_tokens": n}}
        for n in range(1, 6)
    ]
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def voiced(*, chat: bool) -> bytes:
    """A stream of chunks, with counts, between comments, and a trailer behind it."""
    voice = Voice(Answer.words(12), chat=chat, wants_ids=True, wants_usage=True)
    trailer = b": midstream outcome=exact takeovers=1 gap_ms=3.1\n\n"
    return b": an engine's comment\n\n" + undisturbed(voice) + trailer


STREAMS = {
    "completions": voiced(chat=False),
    "chat": voiced(chat=True),
    "generate": generated(),
    "responses": b"".join(told.raw for told in responses_events(RICH, "a")),
    "messages": b"".join(told.raw for told in messages_events(RICH, "a")),
    **RECORDED,
}
# Of each choice of a stream some events, one after the other.
STREAMS["choices"] = STREAMS["chat"] + STREAMS["chat"].replace(b'"index":0', b'"index":1')


def logged(data: bytes) -> tuple[bytes, StreamLog]:
    """A stream as it is sent, and its log."""
    numbering, log = Numbering(TOKEN), StreamLog()
    log.append(numbering.take(data))
    return log.after(0, 1 << 30)[0], log


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_cut_at_any_byte_and_goes_on_is_the_whole_stream(name: str) -> None:
    sent, log = logged(STREAMS[name])
    assert log.last == len(split_events(STREAMS[name])) > 4
    for cut in range(len(sent) + 1):
        have = whole_events(sent[:cut])
        position = position_in(have)
        rest, last = log.after(position, len(sent))
        assert have + rest == sent, f"cut at {cut}"
        assert last == log.last


@pytest.mark.parametrize("name", STREAMS)
def test_every_event_has_its_own_id_and_is_otherwise_what_it_was(name: str) -> None:
    sent, log = logged(STREAMS[name])
    before, after = SseParser().feed(STREAMS[name]), SseParser().feed(sent)
    assert [(event.name, event.data) for event in after] == [(event.name, event.data) for event in before]
    assert [event.id for event in after] == [f"{TOKEN}.{n}" for n in range(1, log.last + 1)]


LINES = st.sampled_from([b"data: x", b"data:", b"id: 7", b": c", b"event: ping", b"data: \xff", b""])
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(LINES, ENDS), max_size=12), st.sampled_from([b"", b"data: half", b"\xef\xbb\xbf"]))
def test_whatever_an_engine_writes_is_numbered_so_that_any_cut_of_it_can_go_on(
    lines: list[tuple[bytes, bytes]], more: bytes
) -> None:
    data = b"".join(line + end for line, end in lines) + more
    sent, log = logged(data)
    parser = SseParser()
    events = parser.feed(sent) + parser.finish()
    assert [event.id for event in events] == [f"{TOKEN}.{n}" for n in range(1, log.last + 1)]
    for cut in range(len(sent) + 1):
        have = whole_events(sent[:cut])
        assert have + log.after(position_in(have), 1 << 20)[0] == sent


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(0, 8))
def test_how_a_stream_was_split_into_writes_of_whole_events_does_not_show(pieces: list[bytes], joined: int) -> None:
    events = [b"data: " + piece.replace(b"\n", b"").replace(b"\r", b"") + b"\n\n" for piece in pieces]
    one, other = Numbering(TOKEN), Numbering(TOKEN)
    together = one.take(b"".join(events[:joined])) + [e for event in events[joined:] for e in one.take(event)]
    assert together == [e for event in events for e in other.take(event)]


def test_an_engines_own_id_does_not_count() -> None:
    assert SseParser().feed(with_id(b"id: 99\ndata: x\nid: 100\n\n", b"id: t.1"))[0].id == "t.1"


def test_a_token_is_128_bits_of_chance_that_fit_in_a_url() -> None:
    random = Random(4)
    tokens = {new_token(random.randbytes(16)) for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(is_token(token) and len(token) == 22 and prefix_of(token) == "" for token in tokens)
    named = new_token(bytes(16), "node-7")
    assert is_token(named)
    assert prefix_of(named) == "node-7"
    assert parse_id(f"{named}.12") == (named, 12)


@pytest.mark.parametrize(
    "text",
    [
        *("", "1", ".1", f"{TOKEN}", f"{TOKEN}.", f"{TOKEN}.-1", f"{TOKEN}.1.2", f"{TOKEN}x.1", f"~{TOKEN}.1"),
        *(f"{TOKEN}.{'9' * 16}", f"{TOKEN}.\u0661", f"{TOKEN[:-1]}/.1", f"{TOKEN}.1\n", "x" * 5000),
    ],
)
def test_what_is_no_id_of_ours_is_none(text: str) -> None:
    assert parse_id(text) is None


def test_positions_are_plain_numbers() -> None:
    assert [parse_position(text) for text in ("0", "17", "+1", "1_0", "1.0", " 1", "")] == [0, 17, *[None] * 5]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(0, 30), st.integers(-1, 400))
def test_a_log_drops_its_oldest_events_up_to_a_position_and_no_more_than_needed(
    sizes: list[int], position: int, bytes_max: int
) -> None:
    log = StreamLog()
    events = [bytes([n % 256]) * size for n, size in enumerate(sizes)]
    log.append(events)
    dropped = log.trim(position, bytes_max)
    left = events[log.first - 1 :]
    assert log.size_bytes == sum(map(len, left)) == sum(sizes) - dropped
    assert log.first - 1 <= position or log.first == 1
    # Enough was dropped, unless it must be kept; and one event less would not have been.
    assert log.size_bytes <= bytes_max or log.first - 1 == min(position, len(events))
    assert log.first == 1 or log.size_bytes + sizes[log.first - 2] > bytes_max
    for start in range(-1, len(events) + 2):
        assert log.has_after(start) == (log.first - 1 <= start <= len(events))
        if log.has_after(start):
            assert log.after(start, 1 << 20) == (b"".join(events[start:]), len(events))


def test_a_piece_of_a_log_holds_at_least_one_event_and_else_no_more_than_asked_for() -> None:
    log = StreamLog()
    log.append([b"a" * 10, b"b" * 10, b"c" * 30])
    assert log.after(0, 25) == (b"a" * 10 + b"b" * 10, 2)
    assert log.after(2, 25) == (b"c" * 30, 3)
    assert log.after(3, 25) == (b"", 3)
