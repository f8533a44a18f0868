"""Streams that a real vLLM 0.32 wrote, as the proxy reads them: all in them is understood, none of their names kept."""

import json
import re
from pathlib import Path

import pytest

from midstream.proxy.dialects.events import EventDialect, Role
from midstream.proxy.dialects.messages import Messages
from midstream.proxy.dialects.responses import Responses
from midstream.proxy.splice import End, Step
from midstream.proxy.splice_events import EventSplicer
from midstream.proxy.sse import Event, SseParser

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.sse"))
recorded = pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
# What vLLM draws anew for each answer.
DRAWN = re.compile(rb'"((?:resp|msg|rs|fc)_|chatcmpl-(?:tool-)?|)([0-9a-f]{16,32})"')


def dialect_of(path: Path) -> EventDialect:
    return Responses() if path.name.startswith("responses") else Messages()


def events_of(raw: bytes) -> list[Event]:
    return SseParser().feed(raw)


def by_another_engine(raw: bytes) -> bytes:
    """The same stream under other names, at another time."""
    raw = DRAWN.sub(lambda found: b'"' + found[1] + bytes(reversed(found[2])) + b'"', raw)
    return re.sub(rb'"created_at":\d+', b'"created_at":1', raw)


def ended(splicer: EventSplicer, step: Step) -> bytes:
    return step.out + (splicer.confirm().out if step.end is End.CLAIMED else b"")


@recorded
def test_every_event_is_understood_and_passed_on(path: Path) -> None:
    raw, dialect = path.read_bytes(), dialect_of(path)
    pieces = [dialect.read(event) for event in events_of(raw)]
    assert all(pieces)
    assert {piece.role for piece in pieces if piece} == {Role.FRAME, Role.TEXT, Role.CLOSES, Role.ENDS}
    splicer = EventSplicer(dialect)
    splicer.begin()
    assert ended(splicer, splicer.feed(events_of(raw))) == raw


@recorded
def test_another_engines_stream_goes_on_after_any_event_under_the_first_ones_names(path: Path) -> None:
    raw, dialect = path.read_bytes(), dialect_of(path)
    first, second = events_of(raw), events_of(by_another_engine(raw))
    assert raw != by_another_engine(raw)
    for cut in range(1, len(first)):
        splicer = EventSplicer(dialect)
        splicer.begin()
        out = splicer.feed(first[:cut]).out
        if splicer.may_close():
            assert out + splicer.close() == raw
            continue
        splicer.begin()
        out += ended(splicer, splicer.feed(second))
        got = [json.loads(event.data or b"") for event in events_of(out)]
        assert len(got) == len(first)
        for body, event in zip(got, first, strict=True):
            if body["type"] in ("response.created", "response.completed"):
                known = json.loads(first[0].data or b"")["response"]
                assert [body["response"][name] for name in ("id", "created_at")] == [known["id"], known["created_at"]]
            assert body.get("sequence_number") == json.loads(event.data or b"").get("sequence_number")
        assert [event.name for event in events_of(out)] == [event.name for event in first]
