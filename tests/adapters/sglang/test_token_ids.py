"""Token ids in chunks that SGLang writes without: each once, in order, and with the text that it came with."""

import json
from typing import Any

from midstream.adapters.sglang.token_ids import Tap, finishes, has_ids
from midstream.proxy.dialects.hiding import Hiding, hide_ids


def chunk(text: str, finish: str | None = None) -> str:
    """A completion's chunk, as SGLang's models write it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
    body = {"id": "r", "object": "text_completion", "created": 1, "choices": [choice], "model": "m"}
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"


def ids_of(event: str) -> dict[str, Any]:
    [choice] = json.loads(event.removeprefix("data: "))["choices"]
    return {name: value for name, value in choice.items() if name.endswith("token_ids")}


def test_each_piece_s_ids_are_written_once_with_its_chunk() -> None:
    tap = Tap(incremental=False)
    told: list[int] = []
    for new, expected in (([5, 6], [5, 6]), ([], []), ([7], [7])):
        told.extend(new)
        tap.take({"output_ids": told})
        assert ids_of(tap.written(chunk("x"))) == {"token_ids": expected}


def test_a_list_that_grows_while_a_chunk_is_written_is_not_told_too_early() -> None:
    tap = Tap(incremental=False)
    told = [1]
    tap.take({"output_ids": told})
    told.append(2)  # the next piece, which comes before this one was written
    assert ids_of(tap.written(chunk("a"))) == {"token_ids": [1]}
    tap.take({"output_ids": told})
    assert ids_of(tap.written(chunk("b"))) == {"token_ids": [2]}


def test_incremental_streams_tell_each_piece_s_own_ids() -> None:
    tap = Tap(incremental=True)
    for ids in ([4], [5, 6]):
        tap.take({"output_ids": ids})
        assert ids_of(tap.written(chunk("x"))) == {"token_ids": ids}


def test_what_had_no_chunk_of_its_own_comes_with_the_next() -> None:
    tap = Tap(incremental=False)
    tap.take({"output_ids": [8]})
    tap.take({"output_ids": [8, 9]})
    assert ids_of(tap.written(chunk("x"))) == {"token_ids": [8, 9]}


def test_the_prompt_s_ids_come_once_and_first() -> None:
    tap = Tap(incremental=False)
    for ids in ([1], [1, 2]):
        tap.take({"output_ids": ids, "prompt_token_ids": [10, 11]})
        expected = {"token_ids": ids[-1:], **({"prompt_token_ids": [10, 11]} if len(ids) == 1 else {})}
        assert ids_of(tap.written(chunk("x"))) == expected


def test_a_text_that_looks_like_a_chunk_is_no_place_for_ids() -> None:
    tap = Tap(incremental=False)
    tap.take({"output_ids": [3]})
    event = tap.written(chunk('"choices":[{ "token_ids":[1], "finish_reason":"stop" }]'))
    assert ids_of(event) == {"token_ids": [3]}
    looks = chunk('"token_ids":[1] "finish_reason":"stop"')
    assert not has_ids(looks)
    assert not finishes(looks)
    assert finishes(chunk("", "stop"))


def test_events_without_a_choice_stay_as_they_are_and_keep_the_ids_waiting() -> None:
    tap = Tap(incremental=False)
    tap.take({"output_ids": [3]})
    for event in ("data: [DONE]\n\n", 'data: {"choices":[],"usage":{}}\n\n'):
        assert tap.written(event) == event
    assert ids_of(tap.written(chunk("x"))) == {"token_ids": [3]}


def test_hidden_again_nothing_is_left_of_them() -> None:
    tap = Tap(incremental=False)
    tap.take({"output_ids": [3], "prompt_token_ids": [1]})
    event = chunk("x", "stop")
    assert hide_ids(tap.written(event).encode(), Hiding.ABSENT) == event.encode()
