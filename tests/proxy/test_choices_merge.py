"""The answers of several choices, put together."""

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.proxy.choices_merge import MergedStream, NotMergeable, merged_bodies, merged_usage
from midstream.proxy.report import Report
from midstream.proxy.sse import SseParser
from midstream.session.errors import EngineError
from support.answers import Answer, Voice, undisturbed

SESSIONS = ("a" * 32, "b" * 32, "c" * 32)
ANSWER = "f" * 32
BOUND = 1 << 20


def voice(index: int, *, chat: bool = False, usage: bool = True) -> Voice:
    """What an engine says for one choice: each has words of its own."""
    answer = Answer(tuple(f" {index}w{i}".encode() for i in range(3 + index)), prompt_ids=tuple(range(4 + index)))
    prefix = "chatcmpl" if chat else "cmpl"
    return Voice(
        answer, chat, wants_ids=True, wants_usage=usage, id=f"{prefix}-{SESSIONS[index]}", created=1700 + index
    )


def merger(prompts: Sequence[int] = (0, 0, 0)) -> MergedStream:
    return MergedStream(prompts, SESSIONS[: len(prompts)], ANSWER, BOUND)


def events(raw: bytes) -> list[bytes]:
    return [event.raw for event in SseParser().feed(raw)]


def chunks(raw: bytes) -> list[dict[str, Any]]:
    found = [event.data for event in SseParser().feed(raw)]
    return [json.loads(data) for data in found if data not in (None, b"[DONE]")]


def said(raw: bytes, index: int) -> str:
    """The text of one choice."""
    choices = chain.from_iterable(chunk["choices"] for chunk in chunks(raw))
    return "".join(c.get("text") or (c.get("delta") or {}).get("content") or "" for c in choices if c["index"] == index)


@pytest.mark.parametrize("chat", [False, True])
@settings(deadline=None)
@given(order=st.permutations([0] * 6 + [1] * 7 + [2] * 8))
def test_however_choices_take_turns_each_says_what_it_says_alone(chat: bool, order: list[int]) -> None:
    merged = merger()
    left = [events(undisturbed(voice(i, chat=chat))) for i in range(3)]
    out = b"".join(merged.take(i, left[i].pop(0)) for i in order if left[i])
    for i in range(3):
        out += b"".join(merged.take(i, raw) for raw in left[i])
    assert merged.complete
    out += merged.ending()
    assert [said(out, i) for i in range(3)] == [voice(i).answer.text() for i in range(3)]
    found = chunks(out)
    assert {chunk["id"] for chunk in found} == {f"{'chatcmpl' if chat else 'cmpl'}-{ANSWER}"}
    assert len({chunk["created"] for chunk in found}) == 1
    assert [chunk["usage"]["completion_tokens"] for chunk in found if "usage" in chunk] == [3 + 4 + 5]
    assert "usage" in found[-1]
    assert out.count(b"[DONE]") == 1
    assert out.endswith(b"data: [DONE]\n\n")


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 97), min_size=1, max_size=12))
def test_how_bytes_are_split_does_not_matter(sizes: list[int]) -> None:
    whole, piecewise = merger(), merger()
    for index in range(3):
        raw = undisturbed(voice(index))
        expected = whole.take(index, raw)
        got, position = b"", 0
        while position < len(raw):
            size = sizes[position % len(sizes)]
            got += piecewise.take(index, raw[position : position + size])
            position += size
        assert got == expected
    assert piecewise.ending() == whole.ending()


def test_a_chunk_keeps_every_byte_but_its_index_and_identity() -> None:
    choice = b'{"index":%d,"text":"\\u00e9 \\"index\\":0","logprobs":1e-05}'
    head = b'data: {"id":"cmpl-%b","created":%d,"choices":[' + choice + b"]}\n\n"
    merged = merger()
    merged.take(0, head % (b"a" * 32, 5, 0))
    assert merged.take(2, head % (b"c" * 32, 7, 0)) == head % (b"f" * 32, 5, 2)


def test_an_index_within_a_choice_is_not_taken_for_its_own() -> None:
    raw = b'data: {"id":"x","choices":[{"delta":{"tool_calls":[{"index":0,"id":"t"}]},"index":0}]}\n\n'
    (chunk,) = chunks(merger().take(2, raw))
    assert chunk["choices"] == [{"delta": {"tool_calls": [{"index": 0, "id": "t"}]}, "index": 2}]


def test_each_prompt_is_counted_once() -> None:
    counts = [
        {"prompt_tokens": p, "total_tokens": p + c, "completion_tokens": c} for p, c in ((5, 1), (5, 2), (7, 3), (7, 4))
    ]
    assert merged_usage(counts, (0, 0, 1, 1)) == {"prompt_tokens": 12, "total_tokens": 22, "completion_tokens": 10}


def test_reasoning_tokens_of_all_choices_are_added_up() -> None:
    counts: list[dict[str, Any] | None] = [
        {"prompt_tokens": 1, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": 2}},
        {"prompt_tokens": 1, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": 3, "x": None}},
    ]
    assert merged_usage(counts, (0, 0))["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_no_usage_chunk_comes_where_no_choice_has_one() -> None:
    merged = merger((0, 0))
    out = b"".join(merged.take(i, undisturbed(voice(i, usage=False))) for i in range(2))
    assert merged.ending() == b"data: [DONE]\n\n"
    assert b"usage" not in out


def test_an_error_ends_the_stream_and_the_others_fall_silent() -> None:
    merged = merger((0, 0))
    error = b'data: {"error":{"message":"gone","code":502}}\n\n'
    assert merged.take(1, error) == error
    assert merged.failed == 1
    assert merged.take(0, undisturbed(voice(0))) == b""
    assert merged.take(1, b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert not merged.complete


def test_reports_of_choices_become_one() -> None:
    merged = merger((0, 0, 0))
    assert merged.take(0, b": midstream outcome=exact takeovers=1 gap_ms=7.5\n\n") == b""
    assert merged.take(1, b": midstream outcome=undisturbed takeovers=0 gap_ms=0.0\n\n") == b""
    assert merged.take(2, b": midstream outcome=recomputed takeovers=2 gap_ms=3.0\n\n") == b""
    assert str(merged.report()) == "midstream outcome=recomputed takeovers=3 gap_ms=7.5"
    assert merged.take(0, b": waiting\n\n") == b": waiting\n\n"


def test_the_report_of_a_refusal_has_no_numbers() -> None:
    report = Report.of_comment(b": midstream outcome=refused\n\n")
    assert str(report) == "midstream outcome=refused"
    assert Report.of_all(()) is None


@pytest.mark.parametrize(
    "text",
    [
        b"outcome=exact takeovers=x gap_ms=1.0",
        b"outcome=exact takeovers=1 gap_ms=1.2.3",
        b"outcome=exact takeovers=%s gap_ms=1.0" % (b"9" * 5000),
        b"outcome=perfect takeovers=1 gap_ms=1.0",
    ],
)
def test_a_comment_that_is_no_report_goes_out_as_it_is(text: bytes) -> None:
    merged = merger((0, 0))
    comment = b": midstream " + text + b"\n\n"
    assert merged.take(0, comment) == comment
    assert merged.report() is None


def test_after_an_event_past_the_bound_its_error_goes_out_whole() -> None:
    merged = MergedStream((0, 0), SESSIONS[:2], ANSWER, 100)
    with pytest.raises(EngineError, match="more than 100 bytes"):
        merged.take(1, b"data: " + b"x" * 200)
    error = b'data: {"error":{"message":"too large","code":502}}\n\n'
    assert merged.take(1, error) == error
    assert merged.failed == 1


def test_whole_answers_become_one_with_their_choices_in_order() -> None:
    bodies = [voice(i).whole(3 + i, "length") for i in range(3)]
    bodies = [b.replace(b'"kv_transfer_params":null', b'"metrics":{"a":1},"x":1e-05') for b in bodies]
    raw = merged_bodies(bodies, (0, 0, 1), SESSIONS, ANSWER)
    got = json.loads(raw)
    assert [c["index"] for c in got["choices"]] == [0, 1, 2]
    assert [c["text"] for c in got["choices"]] == [voice(i).answer.text() for i in range(3)]
    assert got["id"] == f"cmpl-{ANSWER}"
    assert got["created"] == 1700
    assert got["metrics"] is None
    assert got["usage"]["prompt_tokens"] == 4 + 6
    assert got["usage"]["completion_tokens"] == 3 + 4 + 5
    assert list(got) == list(json.loads(bodies[0]))
    assert b'"x":1e-05' in raw


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices":1}', b'{"choices":[]}', b'{"choices":[{},{}]}', b"\xff"]
)
def test_a_body_that_is_not_one_choices_is_named(body: bytes) -> None:
    with pytest.raises(NotMergeable, match="choice 1"):
        merged_bodies([voice(0).whole(3, "stop"), body], (0, 0), SESSIONS, ANSWER)
