"""Streams of `/generate`, told as a whole each time or piece by piece: over all attempts they are one."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from midstream.proxy.coordinator import Reason
from midstream.proxy.dialects.generate import Generate
from midstream.proxy.splice import End, Step
from midstream.proxy.splice_generate import GenerateSplicer
from midstream.proxy.sse import SseParser

IDS = [11, 12, 13, 14, 15]
TEXT = ["Once ", "upon", "", " a ti", "me"]
DONE = b"data: [DONE]\n\n"


def event(count: int, since: int | None, *, name: str = "first", finish: str | None = None) -> bytes:
    """What an engine says with its `count`-th output: all of it, or what came after the first `since`."""
    begin = 0 if since is None else since
    reason = None if finish is None else {"type": finish, "length": count}
    meta = {"id": name, "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": count}
    body = {"text": "".join(TEXT[begin:count]), "output_ids": IDS[begin:count], "meta_info": meta}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def stream(incremental: bool, *, name: str = "first", first: int = 1, to: int = len(IDS), whole: bool = True) -> bytes:
    """A stream whose first event holds `first` outputs."""
    counts = list(range(first, to + 1))
    told = [event(first, None, name=name)] if counts else []
    told += [event(count, before if incremental else None, name=name) for before, count in pairwise(counts)]
    if whole:
        told[-1] = event(to, (to - 1 if len(counts) > 1 else None) if incremental else None, name=name, finish="length")
        told.append(DONE)
    return b"".join(told)


class Client:
    """A client behind the splicer."""

    def __init__(self) -> None:
        self.splicer = GenerateSplicer()
        self.raw = b""

    def attempt(self, raw: bytes, expected: Sequence[int] = ()) -> Step:
        assert self.splicer.begin(expected) is None
        step = self.splicer.feed(SseParser(1 << 20).feed(raw))
        self.raw += step.out
        if step.end is End.GOES_ON:
            step = self.splicer.end_of_stream()
            self.raw += step.out
        return step

    @property
    def events(self) -> list[dict[str, Any]]:
        data = [line[6:] for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in data if line != b"[DONE]"]

    def require_one_answer(self, *, incremental: bool) -> None:
        assert self.raw.count(DONE) == 1
        assert self.raw.endswith(DONE)
        events = self.events
        assert {e["meta_info"]["id"] for e in events} == {"first"}
        assert [e["meta_info"]["finish_reason"] is not None for e in events] == [False] * (len(events) - 1) + [True]
        if incremental:
            assert [token for e in events for token in e["output_ids"]] == IDS
            assert "".join(e["text"] for e in events) == "".join(TEXT)
            return
        assert events[-1]["output_ids"] == IDS
        assert events[-1]["text"] == "".join(TEXT)
        for before, after in pairwise(events):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]


@pytest.mark.parametrize("incremental", [False, True])
def test_an_undisturbed_stream_is_passed_on_byte_for_byte(incremental: bool) -> None:
    client = Client()
    raw = stream(incremental)
    step = client.attempt(raw)
    assert (step.end, step.tokens) == (End.FINISHED, len(IDS))
    assert client.raw == raw
    assert client.splicer.delivered == tuple(IDS)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("cut", [0, 2, 3, 4])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_cut_after_any_token_and_any_replay_give_one_answer(incremental: bool, cut: int, ahead: int) -> None:
    client = Client()
    first = stream(incremental, to=cut, whole=False) if cut else b""
    assert client.attempt(first).end is End.INTERRUPTED
    journal = IDS[: cut + ahead]
    step = client.attempt(stream(incremental, name="second", first=max(len(journal), 1)), journal)
    assert step.end is End.FINISHED
    if not cut:
        assert {e["meta_info"]["id"] for e in client.events} == {"second"}
        return
    client.require_one_answer(incremental=incremental)


@pytest.mark.parametrize("incremental", [False, True])
def test_after_one_event_nobody_knows_how_it_tells_and_the_next_one_shows_it(incremental: bool) -> None:
    client = Client()
    client.attempt(event(1, None))
    client.attempt(stream(incremental, name="second", first=3), IDS[:3])
    client.require_one_answer(incremental=incremental)


def test_an_answer_that_ends_before_it_is_known_is_not_guessed() -> None:
    client = Client()
    client.attempt(event(1, None))
    step = client.attempt(stream(False, name="second", first=5), IDS)
    assert step.end is End.MISMATCH
    assert client.splicer.delivered == (11,)


def test_what_differs_from_the_journal_or_from_what_was_sent_is_not_sent() -> None:
    for old, new in ((b"12", b"99"), (b"upon", b"uqon")):
        client = Client()
        client.attempt(stream(False, to=3, whole=False))
        before = client.raw
        step = client.attempt(stream(False, name="second", first=3).replace(old, new), IDS[:3])
        assert step.end is End.MISMATCH
        assert client.raw == before


def test_ids_that_are_taken_back_or_left_out_are_a_mismatch() -> None:
    back = stream(False, to=2, whole=False) + event(3, None).replace(b"11", b"10")
    gap = event(1, None) + event(3, 2)
    for raw in (back, gap):
        client = Client()
        assert client.attempt(raw).end is End.MISMATCH


def test_an_abort_a_missing_end_and_an_error_are_interruptions() -> None:
    begun = stream(False, to=2, whole=False)
    error = b'data: {"error": {"message": "boom", "code": 500}}\n\n'
    for rest, reason in (
        (event(3, None, finish="abort"), Reason.ABORT),
        (DONE, Reason.EOF),
        (b"", Reason.EOF),
        (error, Reason.ENGINE_ERROR),
    ):
        client = Client()
        step = client.attempt(begun + rest)
        assert (step.end, step.reason) == (End.INTERRUPTED, reason)
        assert client.raw == begun


def test_a_request_s_own_fault_is_its_answer() -> None:
    client = Client()
    raw = b'data: {"error": {"message": "too long", "type": "invalid_request_error", "code": 400}}\n\n' + DONE
    assert client.attempt(raw).end is End.FINISHED
    assert client.raw == raw


def test_the_last_event_is_written_here_where_only_it_is_missing() -> None:
    client = Client()
    client.attempt(stream(False).removesuffix(DONE))
    client.require_one_answer(incremental=False)


def test_an_unstreamed_answer_that_was_given_up_says_so() -> None:
    dialect = Generate()
    assert dialect.gave_up(b'{"text": "x", "meta_info": {"finish_reason": {"type": "abort", "message": "m"}}}')
    assert not dialect.gave_up(b'{"text": "x", "meta_info": {"finish_reason": {"type": "stop", "matched": 2}}}')
    assert not dialect.gave_up(b"[]")


def test_an_event_that_is_not_understood_is_forwarded_once_and_then_nobody_can_go_on() -> None:
    client = Client()
    client.attempt(b"data: what\n\n")
    assert client.splicer.opaque
    fresh = Client()
    fresh.attempt(stream(False, to=2, whole=False))
    assert fresh.attempt(b"data: what\n\n", IDS[:2]).reason is Reason.ENGINE_ERROR
