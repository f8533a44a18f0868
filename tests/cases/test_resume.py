"""Cases from the field: where a stream is taken up again (r1 to r9, r12), on scripted engines."""

import asyncio
import json
import time
from typing import Any

import pytest

from midstream.proxy.coordinator import Reason
from midstream.proxy.settings import ProxySettings
from midstream.proxy.stall import StallPolicy
from support.answers import Answer, Voice, undisturbed
from support.proxying import Got, proxied
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

ANSWER = Answer.words(12)


def pair(answer: Answer, first: Script, second: Script | None = None) -> ScriptedCoordinator:
    """Two workers with the same answer, of which the first meets its fate."""
    standby = second if second is not None else Script()
    return ScriptedCoordinator(ScriptedEngine(answer, first, name="a"), ScriptedEngine(answer, standby, name="b"))


def assert_one_stream(got: Got, answer: Answer, stops: tuple[str, ...] = ()) -> None:
    """What a client must be able to say of every stream, whatever happened to its workers."""
    assert got.status == 200
    assert got.text == answer.text(stops)
    assert len(got.finishes) == 1
    assert got.events.count(b"[DONE]") == 1
    assert got.events[-1] == b"[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in got.chunks}) == 1


@pytest.mark.parametrize("kept", [None, 2])
async def test_r1_an_object_goes_on_within_itself(kept: int | None) -> None:
    answer = Answer((b'{"a"', b": 1", b",", b' "b"', b": [2", b"]}"), finish="stop")
    coordinator = pair(answer, Script(at=3))
    coordinator.cut = kept
    async with proxied(coordinator) as client:
        got = await client.chat(response_format={"type": "json_object"})
    assert_one_stream(got, answer)
    assert json.loads(got.text) == {"a": 1, "b": [2]}


async def test_r2_an_abort_in_good_order_is_held_back_and_the_session_goes_on() -> None:
    coordinator = pair(ANSWER, Script(at=5, fate=Fate.ABORTS))
    async with proxied(coordinator) as client:
        got = await client.complete()
    assert_one_stream(got, ANSWER)
    assert got.finishes == ["length"]
    assert coordinator.of("take_over") == [("take_over", Reason.ABORT, ANSWER.ids[:5])]


async def test_r3_a_stalled_stream_is_noticed_given_up_and_goes_on_elsewhere() -> None:
    coordinator = pair(ANSWER, Script(at=10, fate=Fate.STALLS))
    settings = ProxySettings(stall=StallPolicy(floor_s=0.2, factor=3, ceiling_s=1))
    async with proxied(coordinator, settings) as client:
        got = await client.complete()
        await asyncio.wait_for(coordinator.engines[0].seen[0].cancelled.wait(), 1)
    assert_one_stream(got, ANSWER)
    assert coordinator.of("take_over") == [("take_over", Reason.STALL, ANSWER.ids[:10])]


async def test_r3_a_long_prefill_is_no_stall() -> None:
    coordinator = pair(ANSWER, Script(at=0, fate=Fate.STALLS))
    settings = ProxySettings(stall=StallPolicy(floor_s=0.05, factor=1, ceiling_s=0.05))
    async with proxied(coordinator, settings) as client:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.complete(), 0.5)
    assert coordinator.of("take_over") == []


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("replay_by", [None, 1, 3])
@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("cut_at", [0, 1, 5, 11])
async def test_r4_no_token_is_lost_or_repeated_wherever_the_worker_dies(
    cut_at: int, ahead: int, replay_by: int | None, chat: bool
) -> None:
    coordinator = pair(ANSWER, Script(at=cut_at, ahead=ahead), Script(replay_by=replay_by))
    async with proxied(coordinator) as client:
        ask = client.chat if chat else client.complete
        got = await ask(return_token_ids=True)
    assert_one_stream(got, ANSWER)
    assert got.ids == list(ANSWER.ids)
    assert sum((choice.get("delta") or {}).get("role") is not None for choice in got.choices) == int(chat)
    assert len(coordinator.of("resumed")) == 1
    assert coordinator.of("ended") == [("ended", "finished")]


@pytest.mark.parametrize("cut", [0, 2, 4, 6])
async def test_r4_regenerated_tokens_are_swallowed_as_far_as_the_client_has_them(cut: int) -> None:
    coordinator = pair(ANSWER, Script(at=5, ahead=2))
    coordinator.cut = cut
    async with proxied(coordinator) as client:
        got = await client.complete(return_token_ids=True)
    assert_one_stream(got, ANSWER)
    assert got.ids == list(ANSWER.ids)


async def test_r4_a_session_survives_one_death_after_another() -> None:
    scripts = [Script(at=at) for at in (0, 1, 1, 4, 7, 11)]
    workers = [ScriptedEngine(ANSWER, script, name=f"w{i}") for i, script in enumerate(scripts)]
    coordinator = ScriptedCoordinator(*workers, ScriptedEngine(ANSWER, name="last"))
    async with proxied(coordinator) as client:
        got = await client.complete(return_token_ids=True)
    assert_one_stream(got, ANSWER)
    assert got.ids == list(ANSWER.ids)


async def test_r5_max_tokens_count_for_the_whole_session() -> None:
    coordinator = pair(Answer.words(20), Script(at=15))
    async with proxied(coordinator) as client:
        got = await client.complete(max_tokens=20, return_token_ids=True)
    assert_one_stream(got, Answer.words(20))
    assert len(got.ids) == 20
    assert got.finishes == ["length"]


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("usage", [False, True])
async def test_r5_a_missing_ending_is_written_locally_and_no_worker_is_asked(chat: bool, usage: bool) -> None:
    answer = Answer.words(15)
    coordinator = pair(answer, Script(at=15, finishes_apart=True))
    coordinator.finish = "length"
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    async with proxied(coordinator) as client:
        got = await (client.chat if chat else client.complete)(max_tokens=15, return_token_ids=True, **options)
    assert_one_stream(got, answer)
    assert got.finishes == ["length"]
    assert got.ids == list(answer.ids)
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in got.usages] == ([(3, 15)] if usage else [])
    assert coordinator.engines[1].seen == []
    assert len(coordinator.of("resumed")) == 1


async def test_r5_an_engine_writes_the_ending_where_it_may_owe_text() -> None:
    answer = Answer((b"on", b"e E", b"N"), finish="length")
    coordinator = pair(answer, Script(at=3, finishes_apart=True))
    coordinator.finish = "length"
    async with proxied(coordinator) as client:
        got = await client.complete(stop=["END"], max_tokens=3)
    assert_one_stream(got, answer)
    assert got.text == "one EN"
    resume = coordinator.engines[1].seen[0].body["kv_transfer_params"]["midstream"]["resume"]
    assert resume["outputs"] == list(answer.ids[:2])


async def test_r5_a_lost_done_after_the_finish_needs_no_takeover() -> None:
    answer = Answer.words(4)
    coordinator = pair(answer, Script(at=4))
    async with proxied(coordinator) as client:
        got = await client.complete(stream_options={"include_usage": True})
    assert_one_stream(got, answer)
    assert [u["completion_tokens"] for u in got.usages] == [4]
    assert coordinator.of("take_over") == []


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("asked", [False, True])
async def test_r7_the_client_gets_the_very_bytes_that_it_would_have_got_without_the_proxy(
    chat: bool, asked: bool
) -> None:
    answer = Answer((b'"token_ids":[1,2]', ' \\"é'.encode(), b"\n"), prompt_ids=tuple(range(40)))
    coordinator = ScriptedCoordinator(ScriptedEngine(answer, name="a"))
    async with proxied(coordinator) as client:
        got = await (client.chat if chat else client.complete)(**({"return_token_ids": True} if asked else {}))
    sent = coordinator.engines[0].seen[0].body
    assert sent["return_token_ids"] is True
    kind, created = ("chatcmpl", 1700000000 + 1000 * ord("a") + 1) if chat else ("cmpl", 1700000000 + 97001)
    alone = Voice(answer, chat=chat, wants_ids=asked, id=f"{kind}-a-1", created=created)
    assert got.raw == undisturbed(alone)


async def test_r7_ids_are_hidden_in_unstreamed_answers_too() -> None:
    coordinator = ScriptedCoordinator(ScriptedEngine(ANSWER, name="a"))
    async with proxied(coordinator) as client:
        got = await client.complete(stream=False)
    alone = Voice(ANSWER, chat=False, wants_ids=False, id="cmpl-a-1", created=1700000000 + 97001)
    assert got.raw == alone.whole(12, "length")


@pytest.mark.parametrize("cut_at", range(7))
@pytest.mark.parametrize("replay_by", [None, 1])
async def test_r8_an_emoji_that_spans_the_cut_comes_out_whole(cut_at: int, replay_by: int | None) -> None:
    face = "👩‍🚀".encode()
    answer = Answer((b"a ", face[:2], face[2:5], face[5:9], face[9:], " é".encode()[:2], " é".encode()[2:]))
    coordinator = pair(answer, Script(at=cut_at), Script(replay_by=replay_by))
    async with proxied(coordinator) as client:
        got = await client.complete(return_token_ids=True)
    assert_one_stream(got, answer)
    assert got.text == "a 👩‍🚀 é"
    assert got.ids == list(answer.ids)


async def test_r9_after_an_error_the_session_goes_on_where_the_client_is() -> None:
    coordinator = pair(ANSWER, Script(at=5, fate=Fate.ERRS))
    async with proxied(coordinator) as client:
        got = await client.chat()
    assert_one_stream(got, ANSWER)
    assert b"EngineCore died" not in got.raw
    assert coordinator.of("take_over") == [("take_over", Reason.ENGINE_ERROR, ANSWER.ids[:5])]


@pytest.mark.parametrize("cut_at", range(6))
@pytest.mark.parametrize("replay_by", [None, 1])
async def test_r12_a_stop_string_is_found_across_the_cut_and_never_leaks(cut_at: int, replay_by: int | None) -> None:
    answer = Answer((b"one", b" two E", b"N", b"D", b" never", b" said"))
    coordinator = pair(answer, Script(at=cut_at), Script(replay_by=replay_by))
    async with proxied(coordinator) as client:
        got = await client.complete(stop=["END"])
    assert_one_stream(got, answer, ("END",))
    assert got.text == "one two "
    assert got.finishes == ["stop"]


@pytest.mark.parametrize("cut_at", [1, 2])
async def test_r12_text_held_back_for_a_stop_string_that_does_not_come_is_not_lost(cut_at: int) -> None:
    answer = Answer((b"one EN", b"JOY", b" it"), finish="length")
    coordinator = pair(answer, Script(at=cut_at))
    async with proxied(coordinator) as client:
        got = await client.complete(stop="END")
    assert_one_stream(got, answer)
    assert got.text == "one ENJOY it"


async def test_a_replay_that_differs_from_the_journal_is_never_sent() -> None:
    other = Answer(ANSWER.pieces, first_id=5000)
    first = ScriptedEngine(ANSWER, Script(at=5), name="a")
    coordinator = ScriptedCoordinator(first, ScriptedEngine(other, name="b"), ScriptedEngine(ANSWER, name="c"))
    coordinator.cut = 3
    async with proxied(coordinator) as client:
        got = await client.complete(return_token_ids=True)
    assert_one_stream(got, ANSWER)
    assert got.ids == list(ANSWER.ids)
    (mismatch,) = coordinator.of("mismatched")
    assert "token 1 is 5000 where the journal has 1000" in mismatch[1]
    assert [call[1] for call in coordinator.of("take_over")] == [Reason.EOF, Reason.MISMATCH]


async def test_news_of_a_death_ends_the_reading_at_once() -> None:
    coordinator = pair(ANSWER, Script(at=5, fate=Fate.STALLS))
    async with proxied(coordinator) as client:
        asking = asyncio.create_task(client.complete(return_token_ids=True))
        await coordinator.engines[0].meets_fate.wait()
        await asyncio.sleep(0.05)
        told_s = time.monotonic()
        coordinator.interrupt(Reason.PROCESS_DEATH)
        got = await asking
    assert time.monotonic() - told_s < 0.5
    assert_one_stream(got, ANSWER)
    assert got.ids == list(ANSWER.ids)
    assert coordinator.of("take_over") == [("take_over", Reason.PROCESS_DEATH, ANSWER.ids[:5])]


async def test_an_unstreamed_request_survives_its_worker() -> None:
    coordinator = pair(ANSWER, Script(at=5, ahead=1))
    async with proxied(coordinator) as client:
        got = await client.complete(stream=False)
    assert got.status == 200
    assert got.json["choices"][0]["text"] == ANSWER.text()
    assert got.json["choices"][0]["token_ids"] is None
    marker = coordinator.engines[1].seen[0].body["kv_transfer_params"]["midstream"]
    assert marker["resume"]["outputs"] == list(ANSWER.ids[:6])
    assert len(coordinator.of("resumed")) == 1


@pytest.mark.parametrize("script", [Script(at=3, head_only=True), Script(at=3, fate=Fate.ABORTS)])
async def test_half_an_unstreamed_answer_or_an_aborted_one_is_not_passed_on(script: Script) -> None:
    coordinator = pair(ANSWER, script)
    async with proxied(coordinator) as client:
        got = await client.complete(stream=False)
    assert got.json["choices"][0]["text"] == ANSWER.text()
    assert got.json["choices"][0]["finish_reason"] == "length"


async def test_an_unstreamed_answer_that_differs_from_the_journal_is_not_passed_on() -> None:
    other = Answer(ANSWER.pieces, first_id=5000)
    coordinator = ScriptedCoordinator(
        ScriptedEngine(ANSWER, Script(at=5), name="a"),
        ScriptedEngine(other, name="b"),
        ScriptedEngine(ANSWER, name="c"),
    )
    async with proxied(coordinator) as client:
        got = await client.complete(stream=False, return_token_ids=True)
    assert got.json["choices"][0]["token_ids"] == list(ANSWER.ids)
    assert len(coordinator.of("mismatched")) == 1
