"""Text out of tokens, piece by piece: never half a character, never part of a stop string, the same for every split."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.adapters.transformers.detokenizer import HELD_TOKENS_MAX, Detokenizer, StopMatcher


def of_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: a token is a byte; from 256 on, special tokens without text."""
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def of_words(ids: Sequence[int]) -> str:
    """A tokenizer that puts a space in front of each word, and drops it at the beginning."""
    return " ".join(f"w{i}" for i in ids)


def pushed(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [detokenizer.push(i) for i in ids]


def test_half_an_emoji_is_never_sent() -> None:
    pieces = pushed(Detokenizer(of_bytes, ()), "a🎉b".encode())
    assert pieces == ["a", "", "", "", "🎉", "b"]


def test_the_end_of_an_unfinished_character_is_sent_at_the_end_of_the_stream() -> None:
    detokenizer = Detokenizer(of_bytes, ())
    assert pushed(detokenizer, [*b"ok", 0xF0, 0x9F]) == ["o", "k", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_bytes_that_are_no_text_do_not_hold_the_stream_for_ever() -> None:
    pieces = pushed(Detokenizer(of_bytes, ()), [0xFF] * HELD_TOKENS_MAX)
    assert "".join(pieces) == "\ufffd" * HELD_TOKENS_MAX


def test_the_space_before_the_first_word_depends_on_the_prompt() -> None:
    assert pushed(Detokenizer(of_words, (1, 2)), [3, 4]) == [" w3", " w4"]
    assert pushed(Detokenizer(of_words, ()), [3, 4]) == ["w3", " w4"]


def test_a_prompt_that_ends_within_a_character_is_not_echoed() -> None:
    prompt = list("hé".encode()[:-1])
    pieces = pushed(Detokenizer(of_bytes, prompt), [*"é".encode()[1:], *b"llo"])
    assert "".join(pieces) == "\ufffdllo"


def test_tokens_without_text_change_nothing() -> None:
    assert pushed(Detokenizer(of_bytes, ()), [104, 300, 105, 301, 302]) == ["h", "", "i", "", ""]


@given(st.text(max_size=40), st.text(max_size=8))
def test_the_pieces_are_the_text(text: str, prompt: str) -> None:
    text, prompt = text.replace("\ufffd", ""), prompt.replace("\ufffd", "")
    detokenizer = Detokenizer(of_bytes, prompt.encode("utf-8", "replace"))
    pieces = pushed(detokenizer, text.encode("utf-8", "replace"))
    assert "".join(pieces) + detokenizer.flush() == text.encode("utf-8", "replace").decode()
    assert not any("\ufffd" in piece for piece in pieces)


def matched(stops: Sequence[str], pieces: Sequence[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher, sent = StopMatcher(stops, include=include), ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


def test_a_stop_string_that_comes_in_parts_is_not_sent() -> None:
    matcher = StopMatcher(["END"], include=False)
    assert [matcher.push(p) for p in ("x E", "N", "D y")] == [("x ", None), ("", None), ("", "END")]


def test_what_only_looked_like_a_stop_string_is_sent_after_all() -> None:
    assert matched(["END"], ["E", "N", "EN", "E"]) == ("ENENE", None)


def test_an_included_stop_string_is_sent_and_nothing_behind_it() -> None:
    assert matched(["END"], ["x E", "ND y"], include=True) == ("x END", "END")
    assert matched(["aab"], ["aa", "ab!"], include=True) == ("aaab", "aab")


def test_text_before_min_tokens_neither_stops_nor_begins_a_stop() -> None:
    matcher = StopMatcher(["END"], include=False)
    assert matcher.push("E") == ("", None)
    assert matcher.pass_by("N") == "EN"
    assert matcher.push("D") == ("D", None)


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_the_split_of_the_text_does_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for include in (False, True):
        assert matched(stops, pieces, include=include) == matched(stops, [text], include=include)


@pytest.mark.parametrize("include", [False, True])
def test_the_stop_that_ends_first_wins(include: bool) -> None:
    assert matched(["abcd", "bc"], ["abcd"], include=include) == ("abc" if include else "a", "bc")
