"""Event streams without token ids, spliced: wherever an engine's end cuts, the client gets one undisturbed stream."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from midstream.proxy.coordinator import Reason
from midstream.proxy.dialects.events import EventDialect
from midstream.proxy.dialects.messages import Messages
from midstream.proxy.dialects.responses import Responses
from midstream.proxy.splice import End, Step
from midstream.proxy.splice_events import EventSplicer
from midstream.proxy.sse import Event, SseParser
from support.event_answers import RICH, EventAnswer, Item, Told, joined, messages_events, responses_events

Events = Callable[..., list[Told]]
DIALECTS: tuple[tuple[EventDialect, Events], ...] = ((Responses(), responses_events), (Messages(), messages_events))
both = pytest.mark.parametrize(("dialect", "told"), DIALECTS, ids=["responses", "messages"])


def parsed(raw: bytes) -> list[Event]:
    parser = SseParser()
    return [*parser.feed(raw), *parser.finish()]


def bodies(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in parsed(raw) if event.data is not None]


def raw_of(events: Sequence[Told]) -> bytes:
    return b"".join(event.raw for event in events)


NAME = re.compile(r'"(resp_|rs_|msg_|fc_|call_|sign|chatcmpl-|chatcmpl-tool-)([a-d])(\d*)"')


def same_everywhere(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without what names tell of the engine; one thing must have one name all the time."""
    text = json.dumps(events)
    named: dict[tuple[str, str], set[str]] = {}
    for prefix, engine, index in NAME.findall(text):
        named.setdefault((prefix, index), set()).add(engine)
    assert all(len(engines) == 1 for engines in named.values()), named
    got: list[dict[str, Any]] = json.loads(NAME.sub(r'"\1\3"', text))
    return got


class Client:
    """A splicer, and the bytes that its client has."""

    def __init__(self, dialect: EventDialect) -> None:
        self.splicer = EventSplicer(dialect)
        self.raw = b""

    def attempt(self, raw: bytes, *, whole: bool = True) -> Step:
        """One engine's stream; `whole`: it is confirmed that the engine did not give it up."""
        assert self.splicer.begin() is None
        step = self.splicer.feed(parsed(raw))
        self.raw += step.out
        if step.end is End.CLAIMED and whole:
            step = self.splicer.confirm()
            self.raw += step.out
        elif step.end is End.GOES_ON:
            step = self.splicer.end_of_stream()
            self.raw += step.out
        return step

    def require_like(self, undisturbed: Sequence[Told]) -> None:
        """The client has the first stream, but for the places where text was cut."""
        got = bodies(self.raw)
        assert same_everywhere(joined(got)) == same_everywhere(joined([event.body for event in undisturbed]))
        numbers = [body["sequence_number"] for body in got if "sequence_number" in body]
        assert numbers == list(range(len(numbers)))
        assert all(event.name == json.loads(event.data or b"")["type"] for event in parsed(self.raw))


@both
def test_an_undisturbed_stream_is_passed_on_byte_for_byte(dialect: EventDialect, told: Events) -> None:
    raw = raw_of(told(RICH, "a"))
    client = Client(dialect)
    assert client.attempt(raw).end is End.FINISHED
    assert client.raw == raw


@both
def test_every_split_of_the_bytes_gives_the_same_stream(dialect: EventDialect, told: Events) -> None:
    events = told(RICH, "a")
    cut = len(events) * 2 // 3
    first, second = raw_of(events[:cut]), raw_of(told(RICH, "b", replayed=events[cut - 1].after + 1))
    outs = set()
    for at in range(0, len(second), 7):
        splicer, parser = EventSplicer(dialect), SseParser()
        splicer.begin()
        out = splicer.feed(parsed(first)).out
        splicer.begin()
        for part in (second[:at], second[at:]):
            step = splicer.feed(parser.feed(part))
            out += step.out
        outs.add(out + (splicer.confirm().out if step.end is End.CLAIMED else b""))
    assert len(outs) == 1


@both
def test_a_cut_after_any_event_and_any_replay_give_one_stream(dialect: EventDialect, told: Events) -> None:
    events = told(RICH, "a")
    for cut in range(len(events)):
        after = events[cut - 1].after if cut else 0
        for ahead in (0, 1, 2, RICH.count):
            client = Client(dialect)
            step = client.attempt(raw_of(events[:cut]))
            if step.end is End.FINISHED:
                # Only the last event, which is always the same, was lost.
                assert cut == len(events) - 1
                client.require_like(events)
                continue
            assert (step.end, step.reason) == (End.INTERRUPTED, Reason.EOF)
            step = client.attempt(raw_of(told(RICH, "b", replayed=min(RICH.count, after + ahead))))
            assert step.end is End.FINISHED, (cut, ahead, step.text)
            client.require_like(events)


@both
def test_deaths_in_a_row_leave_one_stream(dialect: EventDialect, told: Events) -> None:
    events = told(RICH, "a")
    client = Client(dialect)
    client.attempt(raw_of(events[: len(events) // 4]))
    for engine, share in (("b", 2), ("c", 3)):
        cut = len(events) * share // 4
        later = told(RICH, engine, replayed=events[cut - 1].after)
        assert client.attempt(raw_of([e for e in later if e.after <= events[cut - 1].after])).end is not End.MISMATCH
    assert client.attempt(raw_of(told(RICH, "d", replayed=RICH.count))).end is End.FINISHED
    client.require_like(events)


@both
def test_a_cut_within_a_replay_repeats_nothing(dialect: EventDialect, told: Events) -> None:
    events = told(RICH, "a")
    later = told(RICH, "b", replayed=9)
    for cut in range(len(later) - 1):
        client = Client(dialect)
        client.attempt(raw_of(events[:10]))
        client.attempt(raw_of(later[:cut]))
        assert client.attempt(raw_of(told(RICH, "c", replayed=12))).end is End.FINISHED
        client.require_like(events)


@both
def test_a_replay_that_differs_is_never_sent(dialect: EventDialect, told: Events) -> None:
    events = told(RICH, "a")
    first = [event for event in events if event.after <= 8]
    first_text = Item("text", ("It ", "was", " otherwise"))
    others = {
        "text": EventAnswer((RICH.items[0], first_text, *RICH.items[2:])),
        "kind": EventAnswer((Item("text", RICH.items[0].pieces), *RICH.items[1:])),
        "too short": EventAnswer((Item("reasoning", ("Let",)), *RICH.items[1:])),
        "too long": EventAnswer((Item("reasoning", (*RICH.items[0].pieces, "!")), *RICH.items[1:])),
        "ends": EventAnswer(RICH.items[:1]),
    }
    for name, other in others.items():
        client = Client(dialect)
        client.attempt(raw_of(first))
        had = client.raw
        step = client.attempt(raw_of(told(other, "b", replayed=8)))
        assert (step.end, step.reason) == (End.MISMATCH, Reason.MISMATCH), name
        assert client.raw == had, name


@both
def test_a_tool_call_to_another_function_is_a_mismatch(dialect: EventDialect, told: Events) -> None:
    answer = EventAnswer((Item("tool", ('{"a"', ": 1}"), "add"),))
    client = Client(dialect)
    client.attempt(raw_of(told(answer, "a")[:-4]))
    other = EventAnswer((Item("tool", answer.items[0].pieces, "subtract"),))
    assert client.attempt(raw_of(told(other, "b"))).end is End.MISMATCH


@both
def test_what_was_given_up_is_taken_up_and_not_closed(dialect: EventDialect, told: Events) -> None:
    events = told(RICH, "a")
    client = Client(dialect)
    step = client.attempt(raw_of(told(RICH, "a", abort_after=7)), whole=False)
    assert step.reason is Reason.ABORT
    assert step.end is (End.CLAIMED if dialect.hides_aborts else End.INTERRUPTED)
    assert b".done" not in client.raw.rpartition(b"output_item.added")[2]
    assert client.raw.count(b"event: content_block_stop") in (0, 1)
    assert client.attempt(raw_of(told(RICH, "b", replayed=7))).end is End.FINISHED
    client.require_like(events)


@both
def test_text_goes_out_with_the_event_that_brought_it(dialect: EventDialect, told: Events) -> None:
    splicer = EventSplicer(dialect)
    splicer.begin()
    for event in told(RICH, "a"):
        step = splicer.feed(parsed(event.raw))
        if step.fresh and step.end is End.GOES_ON:
            assert step.out.endswith(event.raw)
            assert step.tokens == 1


@both
def test_an_empty_answer_is_whole(dialect: EventDialect, told: Events) -> None:
    client = Client(dialect)
    assert client.attempt(raw_of(told(EventAnswer(()), "a"))).end is End.FINISHED
    client.require_like(told(EventAnswer(()), "a"))


@both
def test_an_event_that_is_not_understood_is_forwarded_and_told_of(dialect: EventDialect, told: Events) -> None:
    strange = b"event: strange\ndata: [1, 2\n\n"
    client = Client(dialect)
    client.attempt(raw_of(told(RICH, "a")[:5]) + strange)
    assert client.raw.endswith(strange)
    assert client.splicer.opaque


@both
def test_a_comment_is_passed_on(dialect: EventDialect, told: Events) -> None:
    client = Client(dialect)
    client.attempt(b": hello\n\n" + raw_of(told(RICH, "a")))
    assert client.raw.startswith(b": hello\n\n")


def test_an_error_of_the_engine_is_an_interruption() -> None:
    for dialect, raw in (
        (Messages(), b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"gone"}}\n\n'),
        (Responses(), b'data: {"error":{"message":"gone","type":"InternalServerError","code":500}}\n\n'),
        (Responses(), b'event: error\ndata: {"type":"error","code":"x","message":"gone","sequence_number":3}\n\n'),
        (Responses(), b'event: response.failed\ndata: {"type":"response.failed","response":{"error":null}}\n\n'),
    ):
        client = Client(dialect)
        step = client.attempt(raw)
        assert (step.end, step.reason, client.raw) == (End.INTERRUPTED, Reason.ENGINE_ERROR, b"")


def test_a_request_that_is_at_fault_itself_is_not_tried_again() -> None:
    client = Client(Responses())
    raw = b'data: {"error":{"message":"no such tool","code":400}}\n\n'
    assert client.attempt(raw).end is End.FINISHED
    assert client.raw == raw


def test_a_ping_is_passed_on_and_left_out_of_a_replay() -> None:
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'
    events = messages_events(RICH, "a")
    client = Client(Messages())
    client.attempt(events[0].raw + ping + raw_of(events[1:6]))
    later = messages_events(RICH, "b", replayed=6)
    assert client.attempt(later[0].raw + ping + raw_of(later[1:])).end is End.FINISHED
    assert client.raw.count(ping) == 1
    client.raw = client.raw.replace(ping, b"")
    client.require_like(events)


def test_the_last_event_of_a_message_is_written_here() -> None:
    events = messages_events(RICH, "a")
    client = Client(Messages())
    assert client.attempt(raw_of(events[:-1])).end is End.FINISHED
    assert client.raw == raw_of(events)


def test_responses_keep_the_first_engines_names_and_time() -> None:
    events = responses_events(RICH, "a")
    client = Client(Responses())
    client.attempt(raw_of(events[:9]))
    client.attempt(raw_of(responses_events(RICH, "b", replayed=6, seed_time=1800000000)))
    completed = bodies(client.raw)[-1]["response"]
    assert (completed["id"], completed["created_at"]) == ("resp_a", 1700000000)
    items = completed["output"]
    assert items[0]["id"] == "rs_a0"
    # What began after the cut has the second engine's.
    assert [item["id"] for item in items[2:]] == ["fc_b2", "fc_b3"]
    assert [item["call_id"] for item in items[2:]] == ["call_b2", "call_b3"]
