"""The splicer: whatever the cuts, the replays and the chunking, a client gets one undisturbed stream."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.proxy.coordinator import Reason
from midstream.proxy.dialects.hiding import Hiding
from midstream.proxy.splice import End, Splicer, Step, Wishes
from midstream.proxy.sse import SseParser
from support.answers import DONE, Answer, Voice, undisturbed

PIECES = st.lists(
    st.sampled_from(
        [b" a", b"b", b"E", b"N", b"EN", b"D", b"", "👩‍🚀".encode()[:2], "é".encode(), b"\xf0\x9f", b"\x98\x80"]
    ),
    min_size=1,
    max_size=14,
).filter(lambda pieces: _decodes(b"".join(pieces)))


def _decodes(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def feed(splicer: Splicer, *raws: bytes) -> Step:
    """Feed raw events; the last step, with the output of all."""
    parser, out, step = SseParser(), b"", Step(b"")
    for raw in raws:
        step = splicer.feed(parser.feed(raw))
        out += step.out
        if step.end is not End.GOES_ON:
            break
    return Step(out, step.end, step.fresh, step.tokens, step.reason, step.text)


def attempt(voice: Voice, outputs: int, replay: Sequence[int], until: int | None) -> list[bytes]:
    """A worker's stream: `outputs` tokens replayed, cut at the places of `replay`, then token by token."""
    count = voice.answer.length(voice.stops)
    finish = "stop" if count < len(voice.answer.pieces) else voice.answer.finish
    outputs = min(outputs, count)
    places = sorted({0, outputs, *(place for place in replay if place < outputs)})
    steps = list(itertools.pairwise(places)) + [(i, i + 1) for i in range(outputs, count)]
    chunks = [voice.role()] if voice.chat else []
    for start, end in steps:
        if until is not None and end > max(until, outputs):
            return chunks
        chunks.append(voice.tokens(start, end, first=start == 0, finish=finish if end == count else None))
    return chunks + ([voice.usage(count)] if voice.wants_usage else []) + [DONE]


def text_and_ids(raw: bytes) -> tuple[str, list[int], list[str], list[dict[str, Any]]]:
    """What a client makes of a stream."""
    text = ""
    ids: list[int] = []
    finishes: list[str] = []
    usages: list[dict[str, Any]] = []
    for part in raw.split(b"\n\n"):
        if not part or part == b"data: [DONE]":
            continue
        chunk = json.loads(part.removeprefix(b"data: "))
        usages += [chunk["usage"]] if chunk.get("usage") else []
        for choice in chunk["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            ids += choice["token_ids"] if choice.get("token_ids") else []
            finishes += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, ids, finishes, usages


@settings(max_examples=300, deadline=None)
@given(
    pieces=PIECES,
    chat=st.booleans(),
    usage=st.booleans(),
    stops=st.sampled_from([(), ("END",), ("EN",)]),
    # Of each worker but the last: after how many more tokens it dies, how many more were journaled; then of its
    # successor: how many of the journaled tokens it has to regenerate, and where its replay is cut.
    deaths=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 8), st.lists(st.integers(0, 14), max_size=4)),
        max_size=4,
    ),
)
def test_a_client_gets_the_undisturbed_stream_whatever_the_workers_do(
    pieces: list[bytes],
    chat: bool,
    usage: bool,
    stops: tuple[str, ...],
    deaths: list[tuple[int, int, int, list[int]]],
) -> None:
    answer = Answer(tuple(pieces))
    splicer = Splicer(Wishes(chat=chat, hiding=None, usage=usage, stop_strings=bool(stops), holds_back=bool(stops)))
    out, outputs, journal = b"", 0, 0
    replay: list[int] = []
    for number, (more, ahead, lag, next_replay) in enumerate(deaths):
        voice = Voice(answer, chat, True, usage, stops, id=f"w{number}", created=number)
        assert splicer.begin(answer.ids[:journal]) is None
        step = feed(splicer, *attempt(voice, outputs, replay, outputs + more))
        assert step.end is not End.MISMATCH, step.text
        out += step.out
        if step.end is End.FINISHED:
            break
        journal = min(max(journal, len(splicer.delivered) + ahead), len(pieces))
        outputs, replay = max(0, journal - lag), next_replay
        if splicer.may_close():
            out += splicer.close()
            break
    else:
        assert splicer.begin(answer.ids[:journal]) is None
        voice = Voice(answer, chat, True, usage, stops, id="last", created=99)
        step = feed(splicer, *attempt(voice, outputs, replay, None))
        assert step.end is End.FINISHED, step.text
        out += step.out
    alone = undisturbed(Voice(answer, chat, True, usage, stops))
    assert text_and_ids(out) == text_and_ids(alone)
    assert out.count(DONE) == 1
    assert out.endswith(DONE)
    heads = {(c["id"], c["created"]) for c in map(json.loads, _datas(out))}
    assert len(heads) == 1
    assert out.count(b'"role"') == int(chat)
    assert out.count(b'"prompt_token_ids":[') == 1


def _datas(raw: bytes) -> list[bytes]:
    parts = (part.removeprefix(b"data: ") for part in raw.split(b"\n\n"))
    return [part for part in parts if part and part != b"[DONE]"]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(0, 9), st.data())
def test_nothing_of_a_wrong_token_is_ever_sent(sent: int, ahead: int, data: st.DataObject) -> None:
    answer = Answer.words(20)
    journal = answer.ids[: sent + ahead]
    wrong_at = data.draw(st.integers(0, len(journal) - 1))
    splicer = Splicer(Wishes(chat=False, hiding=None))
    splicer.begin()
    feed(splicer, *attempt(Voice(answer, False, True), 0, [], sent))
    pieces = list(answer.pieces)
    pieces[wrong_at] = b" wrong"
    liar = _Liar(tuple(pieces), wrong_at=wrong_at)
    cut = data.draw(st.integers(0, len(journal)))
    assert splicer.begin(journal) is None
    step = feed(splicer, *attempt(Voice(liar, False, True), cut, [], None))
    assert step.end is End.MISMATCH
    assert b"wrong" not in step.out
    assert splicer.delivered == answer.ids[: max(sent, len(splicer.delivered))]
    assert len(splicer.delivered) <= max(sent, wrong_at)


class _Liar(Answer):
    """An answer one of whose ids is another than it was."""

    __slots__ = ("_wrong_at",)
    _wrong_at: int

    def __init__(self, pieces: tuple[bytes, ...], wrong_at: int) -> None:
        super().__init__(pieces)
        object.__setattr__(self, "_wrong_at", wrong_at)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids, one of them wrong."""
        right = range(self.first_id, self.first_id + len(self.pieces))
        return tuple(7 if i == self._wrong_at else token for i, token in enumerate(right))


def test_equal_ids_with_another_text_are_a_mismatch() -> None:
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    feed(splicer, *attempt(Voice(Answer((b"a", b"b")), False, True), 0, [], 1))
    assert splicer.begin(()) is None
    step = feed(splicer, *attempt(Voice(Answer((b"x", b"b")), False, True), 0, [], None))
    assert (step.end, step.out) == (End.MISMATCH, b"")
    assert "the text of text differs" in step.text


def test_a_worker_that_finishes_before_the_journal_does_is_a_mismatch() -> None:
    splicer = Splicer(Wishes(chat=False))
    answer = Answer.words(9)
    splicer.begin()
    feed(splicer, *attempt(Voice(answer, False, True), 0, [], 4))
    splicer.begin(answer.ids[:6])
    step = feed(splicer, *attempt(Voice(Answer.words(5), False, True), 0, [], None))
    assert step.end is End.MISMATCH
    assert splicer.delivered == answer.ids[:4]


def test_a_journal_that_differs_from_what_was_sent_is_refused_before_anything_is_asked() -> None:
    splicer = Splicer(Wishes(chat=False))
    answer = Answer.words(4)
    splicer.begin()
    feed(splicer, *attempt(Voice(answer, False, True), 0, [], 2))
    assert splicer.begin((answer.ids[0], 4)) is not None


@pytest.mark.parametrize("finish", ["abort", "cancelled", "error"])
def test_an_engines_own_abort_is_an_interruption_and_not_sent(finish: str) -> None:
    splicer = Splicer(Wishes(chat=True))
    splicer.begin()
    voice = Voice(Answer.words(3), True, True)
    step = feed(splicer, voice.role(), voice.tokens(0, 1, first=True), voice.tokens(1, 2, first=False, finish=finish))
    assert (step.end, step.reason) == (End.INTERRUPTED, Reason.ABORT)
    assert splicer.delivered == voice.answer.ids[:1]


def test_done_without_a_finish_reason_is_an_interruption() -> None:
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    step = feed(splicer, Voice(Answer.words(3), False, True).tokens(0, 1, first=True) + DONE)
    assert (step.end, step.reason) == (End.INTERRUPTED, Reason.EOF)


def test_a_clients_own_fault_is_passed_on_and_another_error_is_not() -> None:
    fault = b'data: {"error":{"message":"bad grammar","type":"BadRequestError","param":null,"code":400}}\n\n'
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    assert feed(splicer, fault + DONE) == Step(fault + DONE, End.FINISHED)
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    step = feed(splicer, fault.replace(b"400", b"500") + DONE)
    assert (step.end, step.reason, step.out) == (End.INTERRUPTED, Reason.ENGINE_ERROR, b"")


def tool(index: int, arguments: str, ids: list[int], head: str | None = None, name: str = "get") -> bytes:
    """A chunk that streams a tool call, as vLLM writes it."""
    call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
    if head is not None:
        call = {"id": head, "type": "function"} | call
        call["function"] = {"name": name, "arguments": arguments}
    choice = {"index": 0, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None, "token_ids": ids}
    body = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def test_a_tool_call_goes_on_within_its_arguments_under_its_first_id() -> None:
    splicer = Splicer(Wishes(chat=True, hiding=None))
    splicer.begin()
    first = feed(splicer, tool(0, "", [1], head="call-a"), tool(0, '{"a', [2, 3]))
    splicer.begin((1, 2, 3, 4))
    rest = feed(splicer, tool(0, '{"a": 1', [1, 2, 3, 4], head="call-b"), tool(0, "}", [5]))
    rest_of_it = feed(splicer, tool(1, "{}", [6], head="call-c", name="put"))
    calls = [
        json.loads(data)["choices"][0]["delta"]["tool_calls"][0]
        for data in _datas(first.out + rest.out + rest_of_it.out)
    ]
    assert [call.get("id") for call in calls] == ["call-a", None, None, None, "call-c"]
    assert "".join(call["function"]["arguments"] for call in calls if call["index"] == 0) == '{"a": 1}'
    assert splicer.delivered == (1, 2, 3, 4, 5, 6)


def test_logprobs_of_a_half_known_chunk_are_those_of_its_new_tokens() -> None:
    def chunk(ids: list[int], text: str) -> bytes:
        logprobs = {"content": [{"token": str(i)} for i in ids]}
        choice = {"index": 0, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None, "token_ids": ids}
        return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"

    splicer = Splicer(Wishes(chat=True, hiding=Hiding.NULL))
    splicer.begin()
    feed(splicer, chunk([1, 2], "ab"))
    splicer.begin((1, 2, 3))
    step = feed(splicer, chunk([1, 2, 3], "abc"))
    (choice,) = json.loads(_datas(step.out)[0])["choices"]
    assert choice["logprobs"] == {"content": [{"token": "3"}]}
    assert (choice["delta"]["content"], choice["token_ids"]) == ("c", None)


def test_chunks_that_an_engine_sends_for_their_ids_alone_are_swallowed_where_ids_are_hidden() -> None:
    raw = (
        b'data: {"id":"c","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":null,"token_ids":[4]}]}\n\n'
    )
    hidden, shown = Splicer(Wishes(chat=True)), Splicer(Wishes(chat=True, hiding=None))
    for splicer in (hidden, shown):
        splicer.begin()
    assert feed(hidden, raw).out == b""
    assert hidden.delivered == (4,)
    assert feed(shown, raw).out == raw


def test_ids_in_json_over_several_data_lines_are_hidden_too() -> None:
    choice = b'{"index":0,"text":"x","token_ids":[4,\ndata: 5],\ndata: "finish_reason":null}'
    raw = b'data: {"id":"c","choices":[' + choice + b"]}\n\n"
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    step = feed(splicer, raw)
    (data,) = _datas(step.out)
    assert json.loads(data)["choices"][0] == {"index": 0, "text": "x", "token_ids": None, "finish_reason": None}


def test_an_event_that_is_not_understood_is_forwarded_but_makes_the_stream_stay_where_it_is() -> None:
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    assert feed(splicer, b"data: something else\n\n").out == b"data: something else\n\n"
    assert splicer.opaque


def test_of_what_the_client_has_not_even_an_empty_chunk_is_sent() -> None:
    splicer = Splicer(Wishes(chat=True))
    voice = Voice(Answer.words(4), True, True)
    splicer.begin()
    feed(splicer, *attempt(voice, 0, [], 2))
    splicer.begin(voice.answer.ids[:2])
    step = feed(splicer, voice.role(), voice.tokens(0, 1, first=True), voice.tokens(1, 2, first=False))
    assert (step.out, step.fresh) == (b"", False)


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES, chat=st.booleans(), hide=st.booleans(), cut=st.integers(0, 14))
def test_the_short_cut_for_the_usual_event_agrees_with_the_rules(
    pieces: list[bytes], chat: bool, hide: bool, cut: int
) -> None:
    chunks = attempt(Voice(Answer(tuple(pieces)), chat, True), 0, [], cut)
    wishes = Wishes(chat=chat, hiding=Hiding.NULL if hide else None)
    singly, together = Splicer(wishes), Splicer(wishes)
    for splicer in (singly, together):
        splicer.begin()
    one_by_one = b"".join(feed(singly, chunk).out for chunk in chunks)
    # A comment in each read keeps the short cut from being taken.
    at_once = feed(together, *(chunk + b":\n\n" for chunk in chunks)).out
    assert one_by_one == at_once.replace(b":\n\n", b"")
    assert singly.delivered == together.delivered
    for splicer in (singly, together):
        assert splicer.begin(singly.delivered) is None
    whole = attempt(Voice(Answer(tuple(pieces)), chat, True), cut, [], None)
    assert feed(singly, *whole) == feed(together, *whole)


def test_an_ending_is_not_written_here_when_the_newest_token_came_without_its_text() -> None:
    answer = Answer((b"a", "é".encode()[:1], "é".encode()[1:]))
    with_text, without_text = Splicer(Wishes(chat=False)), Splicer(Wishes(chat=False))
    for splicer, count in ((with_text, 1), (without_text, 2)):
        splicer.begin()
        feed(splicer, *attempt(Voice(answer, False, True), 0, [], count))
    assert with_text.may_finish(answer.ids[:1])
    assert not without_text.may_finish(answer.ids[:2])


def test_a_refusal_of_the_engine_stays_one_when_its_worker_dies_before_done() -> None:
    fault = b'data: {"error":{"message":"bad grammar","type":"BadRequestError","param":null,"code":400}}\n\n'
    splicer = Splicer(Wishes(chat=False, usage=True))
    splicer.begin()
    assert feed(splicer, fault).end is End.GOES_ON
    assert splicer.end_of_stream() == Step(DONE, End.FINISHED, fresh=True)


def test_a_finish_that_the_client_has_is_not_said_again() -> None:
    def chunk(finish: str | None, ids: list[int], text: str) -> bytes:
        choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
        return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"

    # Nothing has told the length of the prompt, so the usage has to come from another engine.
    splicer = Splicer(Wishes(chat=False, usage=True))
    splicer.begin()
    feed(splicer, chunk(None, [1], "a"), chunk("length", [2], "b"))
    assert not splicer.may_close()
    splicer.begin((1, 2))
    usage = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
    step = feed(splicer, chunk("length", [1, 2], "ab"), usage, DONE)
    assert (step.out, step.end) == (usage + DONE, End.FINISHED)


@pytest.mark.parametrize("wrong", [-1, 1 << 32, 1 << 70])
def test_what_is_no_token_id_is_not_understood_and_breaks_nothing(wrong: int) -> None:
    splicer = Splicer(Wishes(chat=False))
    splicer.begin()
    feed(splicer, b'data: {"id":"c","choices":[{"index":0,"text":"x","token_ids":[%d]}]}\n\n' % wrong)
    assert splicer.opaque
