"""The SSE parser: the same events for every split, the bytes as they came, and a bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.proxy.sse import Event, SseParser, encode_comment, encode_event
from midstream.session.errors import EngineError

FIELDS = ["data: x", "data:y", "data:  z", "data", "event: e", "id: 7", "id: a\0b", "retry: 5", "é👩: ü"]
LINES = st.sampled_from([*FIELDS, ": comment", "", ""])
ENDS = st.sampled_from(["\n", "\r\n", "\r"])
STREAMS = st.lists(st.tuples(LINES, ENDS), max_size=20).map(
    lambda lines: "".join(line + end for line, end in lines).encode()
)


def parse(*pieces: bytes) -> list[Event]:
    """All events of a stream that comes in these pieces."""
    parser = SseParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at the given places."""
    places = sorted({min(cut, len(data)) for cut in cuts})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@given(STREAMS, st.lists(st.integers(0, 200), max_size=12))
def test_every_split_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    assert parse(*split(stream, cuts)) == parse(stream)


@given(STREAMS)
def test_a_stream_that_comes_byte_by_byte_gives_the_same_events(stream: bytes) -> None:
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == parse(stream)


@given(STREAMS, st.lists(st.integers(0, 200), max_size=12))
def test_the_raw_bytes_of_all_events_are_the_stream(stream: bytes, cuts: list[int]) -> None:
    assert b"".join(event.raw for event in parse(*split(stream, cuts))) == stream


@given(st.lists(st.integers(0, 300), max_size=8))
def test_the_short_cut_for_the_usual_stream_agrees_with_the_rules(cuts: list[int]) -> None:
    usual = 'data: {"a":"é"}\n\ndata: {"b":1}\n\n\n: c\n\nevent: e\ndata: 1\ndata: 2\n\ndata:x\n\n'.encode()
    slowly = parse(usual.replace(b"\n", b"\r\n"))
    events = parse(*split(usual, cuts))
    assert [(e.data, e.name) for e in events if e.data] == [(e.data, e.name) for e in slowly if e.data]


def test_fields_are_read_as_the_standard_says() -> None:
    (event,) = parse(b"\xef\xbb\xbfevent: e\nid: 7\ndata: a\ndata:b\ndata:  c\ndata\n: no\nid: x\0y\nother: 1\n\n")
    assert event.data == b"a\nb\n c\n"
    assert (event.name, event.id) == ("e", "7")


def test_a_comment_has_no_data_but_keeps_its_bytes() -> None:
    assert parse(b": hello\n\n") == [Event(b": hello\n\n", None)]


def test_an_event_without_an_empty_line_at_the_end_of_the_stream_counts() -> None:
    assert [event.data for event in parse(b"data: a\n\ndata: [DONE]")] == [b"a", b"[DONE]"]


def test_a_line_of_two_megabytes_comes_through_in_small_pieces() -> None:
    line = b"data: " + b"x" * (2 << 20) + b"\n\n"
    (event,) = parse(*(line[i : i + 65536] for i in range(0, len(line), 65536)))
    assert event.raw == line


def test_an_event_past_the_bound_is_a_clear_error() -> None:
    parser = SseParser(buffer_bytes_max=100)
    assert len(parser.feed(b"data: a\n\n" * 100)) == 100
    with pytest.raises(EngineError, match="more than 100 bytes"):
        parser.feed(b"data: " + b"x" * 100)


@given(st.binary(max_size=40).filter(lambda data: b"\r" not in data))
def test_what_is_encoded_is_read_again(data: bytes) -> None:
    (event,) = parse(encode_event(data))
    assert event.data == data


def test_a_comment_stays_one_line() -> None:
    assert encode_comment("a\nb\rc") == b": a b c\n\n"
