"""The front end of one session: text, endings, and the same state after a replay."""

from hypothesis import given
from hypothesis import strategies as st

from midstream.adapters.transformers.output import Finish, Output
from midstream.adapters.transformers.protocol import SamplingParams

EOS = 256


def text_of(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def output(params: SamplingParams, max_tokens: int = 100) -> Output:
    return Output(params, max_tokens, frozenset({EOS}), lambda ids: text_of(list(ids)), b"prompt ")


def said(front: Output, ids: list[int]) -> str:
    text = ""
    for token in ids:
        piece = front.push(token)
        text += piece.text
        if piece.finish is not None:
            break
    return text


def test_the_end_token_ends_without_text() -> None:
    front = output(SamplingParams())
    assert said(front, [*b"hi", EOS]) == "hi"
    assert (front.finish, front.stop_reason, front.count) == (Finish.STOP, None, 3)


def test_an_ignored_end_token_is_a_token_like_others() -> None:
    front = output(SamplingParams(ignore_eos=True))
    assert said(front, [*b"hi", EOS, *b"ho"]) == "hiho"
    assert front.finish is None


def test_a_stop_token_names_itself() -> None:
    front = output(SamplingParams(stop_token_ids=(ord("!"),)))
    assert said(front, list(b"hi!x")) == "hi"
    assert (front.finish, front.stop_reason) == (Finish.STOP, ord("!"))


def test_max_tokens_is_length_even_within_a_character() -> None:
    front = output(SamplingParams(), max_tokens=3)
    assert said(front, [ord("a"), *"🎉".encode()]) == "a\ufffd"
    assert front.finish is Finish.LENGTH


def test_a_stop_string_at_the_last_token_is_stop_and_not_length() -> None:
    front = output(SamplingParams(stop=("bc",)), max_tokens=3)
    assert said(front, list(b"abc")) == "a"
    assert (front.finish, front.stop_reason) == (Finish.STOP, "bc")


def test_text_held_for_a_stop_string_is_sent_when_the_stream_ends_otherwise() -> None:
    front = output(SamplingParams(stop=("END",)))
    assert said(front, [*b"xEN", EOS]) == "xEN"
    front = output(SamplingParams(stop=("END",)), max_tokens=3)
    assert said(front, list(b"xEN")) == "xEN"
    front = output(SamplingParams(stop=("END",)))
    assert said(front, list(b"xEN")) + front.abort() == "xEN"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    front = output(SamplingParams(stop=("a",), min_tokens=3))
    assert said(front, list(b"aaab a")) == "aaab "


@given(st.binary(min_size=1, max_size=30), st.integers(0, 30))
def test_a_replayed_session_says_the_same(raw: bytes, cut: int) -> None:
    params = SamplingParams(stop=("ab", "\ufffd\ufffd"), min_tokens=2)
    ids = list(raw)
    whole = output(params, max_tokens=25)
    wanted = said(whole, ids)
    again = output(params, max_tokens=25)
    piece = again.replay(ids[:cut])
    text = piece.text if again.finish is not None else piece.text + said(again, ids[len(piece.token_ids) :])
    assert text == wanted
    assert (again.finish, again.stop_reason, again.count) == (whole.finish, whole.stop_reason, whole.count)
