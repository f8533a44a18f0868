"""Chats whose token ids the engine withholds: text alone decides where they go on."""

import json

import pytest

from midstream.proxy.progress import Beat, Progress
from midstream.proxy.splice import Splicer, Step, Wishes
from midstream.proxy.sse import SseParser
from support.answers import Answer, Voice, undisturbed
from support.proxying import proxied
from support.scripted import Fate, Script, ScriptedCoordinator, ScriptedEngine

WORDS = Answer.words(9)
CRAB = Answer(tuple(bytes([byte]) for byte in "Hi 🦀🦀 é!".encode()))


def said(raw: bytes) -> str:
    """The text of a stream of chunks."""
    text = ""
    for event in SseParser().feed(raw):
        if event.data not in (None, b"[DONE]"):
            for choice in json.loads(event.data or b"")["choices"]:
                text += choice["delta"].get("content") or ""
    return text


@pytest.mark.parametrize("answer", [WORDS, CRAB], ids=["words", "characters"])
@pytest.mark.parametrize("fate", [Fate.DIES, Fate.ERRS, Fate.ABORTS, Fate.ENDS])
@pytest.mark.parametrize(("at", "ahead", "by"), [(0, 0, None), (1, 0, None), (4, 3, None), (5, 0, 2), (9, 0, None)])
async def test_a_chat_with_hidden_ids_goes_on(answer: Answer, fate: Fate, at: int, ahead: int, by: int | None) -> None:
    script = Script(at=at, fate=fate, ahead=ahead, finishes_apart=True)
    coordinator = ScriptedCoordinator(
        ScriptedEngine(answer, script, name="a"), ScriptedEngine(answer, Script(replay_by=by), name="b")
    )
    async with proxied(coordinator) as client:
        got = await client.chat(include_reasoning=False)
    assert said(got.raw) == answer.text()
    assert got.events[-1] == b"[DONE]"
    assert [c["finish_reason"] for chunk in got.chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"]
    assert len({chunk["id"] for chunk in got.chunks}) == 1
    assert sum("role" in c["delta"] for chunk in got.chunks for c in chunk["choices"]) == 1
    [(_, _, delivered)] = coordinator.of("take_over")
    assert delivered == ()
    assert all("return_token_ids" not in engine.seen[0].body for engine in coordinator.engines)


async def test_the_counts_of_a_chat_with_hidden_ids_are_an_engines_own() -> None:
    coordinator = ScriptedCoordinator(
        ScriptedEngine(WORDS, Script(at=9, finishes_apart=False), name="a"), ScriptedEngine(WORDS, name="b")
    )
    async with proxied(coordinator) as client:
        got = await client.chat(include_reasoning=False, stream_options={"include_usage": True})
    usages = [chunk["usage"] for chunk in got.chunks if chunk.get("usage")]
    assert usages == [{"prompt_tokens": 3, "total_tokens": 12, "completion_tokens": 9}]
    assert said(got.raw) == WORDS.text()


async def test_other_text_than_before_is_never_sent() -> None:
    other = Answer((*WORDS.pieces[:3], b" other", *WORDS.pieces[4:]))
    coordinator = ScriptedCoordinator(
        ScriptedEngine(WORDS, Script(at=5), name="a"),
        ScriptedEngine(other, name="b"),
        ScriptedEngine(WORDS, name="c"),
    )
    async with proxied(coordinator) as client:
        got = await client.chat(include_reasoning=False)
    assert said(got.raw) == WORDS.text()
    assert len(coordinator.of("mismatched")) == 1


def test_without_ids_the_bytes_stay_as_they_are() -> None:
    raw = undisturbed(Voice(WORDS, chat=True, wants_ids=False))
    splicer = Splicer(Wishes(chat=True, shows_ids=False))
    splicer.begin()
    assert splicer.feed(SseParser().feed(raw)).out == raw


def test_what_arrives_first_past_the_clients_text_may_be_a_replay() -> None:
    old, new, nothing = Step(b"", tokens=1), Step(b"x", fresh=True, tokens=1), Step(b"")
    seen = Progress(3, knows_ids=False)
    assert [seen.take(step) for step in (nothing, old, new, new)] == [
        Beat.NOTHING, Beat.REPLAYED, Beat.PERHAPS_OWN, Beat.OWN,
    ]  # fmt: skip
    counted = Progress(3, knows_ids=True)
    assert [counted.take(step) for step in (new, nothing, Step(b"", tokens=2), new)] == [
        Beat.REPLAYED, Beat.NOTHING, Beat.REPLAYED, Beat.OWN,
    ]  # fmt: skip
    for knows_ids in (True, False):
        assert Progress(0, knows_ids=knows_ids).take(new) is Beat.OWN
