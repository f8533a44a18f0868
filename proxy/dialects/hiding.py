"""Takes token ids out of an engine's bytes again, where the client did not ask for them.

Invariant: every other byte stays as the engine sent it, and the result is what the engine would have sent had nobody
asked. Works on raw bytes (an SSE event or a JSON body), so nothing is decoded and encoded again.
"""

import re
from enum import StrEnum

_NAME = b'token_ids"'
_OUTPUT_LIST = b'"token_ids":['
_BACKSLASH = 0x5C
_PROMPT = b'"prompt_'
_LIST = re.compile(rb"\s*:\s*(\[[\d,\s]*\])")
_COMMA_BEFORE = re.compile(rb",\s*$")
_COMMA_AFTER = re.compile(rb"\s*,\s*")


class Hiding(StrEnum):
    """What the engine writes in the place of token ids that were not asked for.

    vLLM 0.32 writes null wherever it would have written the ids: its chunks leave out only fields that were never set,
    and these are set to None (`entrypoints/openai/*/serving.py`); its unstreamed answers write all fields.
    """

    NULL = "null"
    ABSENT = "absent"


def hide_ids(raw: bytes, hiding: Hiding) -> bytes:
    """`raw` without the ids of output and prompt."""
    at = raw.find(_NAME)
    while at >= 0:
        start, end = _member(raw, at)
        if end == 0:
            at = raw.find(_NAME, at + len(_NAME))
            continue
        if hiding is Hiding.NULL:
            raw = raw[: raw.index(b"[", at)] + b"null" + raw[end:]
            at = raw.find(_NAME, at + len(_NAME))
        else:
            raw = _removed(raw, start, end)
            at = raw.find(_NAME, start)
    return raw


def hide_one_list(raw: bytes, hiding: Hiding) -> bytes:
    """The same for a chunk that is known to hold one list of ids, and none of the prompt's."""
    start = raw.rfind(_OUTPUT_LIST)
    if hiding is not Hiding.NULL or start < 1 or raw[start - 1] == _BACKSLASH:
        return hide_ids(raw, hiding)
    start += len(_OUTPUT_LIST) - 1
    return raw[:start] + b"null" + raw[raw.index(b"]", start) + 1 :]


def _member(raw: bytes, at: int) -> tuple[int, int]:
    """Where the member whose name ends at `at` begins and ends; its end is 0 if it is not a list of ids.

    `"token_ids":[1,2]` in raw JSON can only be a key and its value. Within a string its quotes would be escaped, so the
    opening quote would follow a backslash. And a closing quote in the place of the opening one would be followed by a
    comma, a colon or a bracket, never by a letter.
    """
    start = at - 1 if raw[at - 1 : at] == b'"' else at - len(_PROMPT)
    if start < 0 or (start < at - 1 and raw[start:at] != _PROMPT) or raw[start - 1 : start] == b"\\":
        return start, 0
    value = _LIST.match(raw, at + len(_NAME))
    return start, value.end() if value is not None else 0


def _removed(raw: bytes, start: int, end: int) -> bytes:
    """`raw` without a member, and without the comma before it, or else after it."""
    before = _COMMA_BEFORE.search(raw[max(0, start - 16) : start])
    if before is not None:
        return raw[: start - len(before.group())] + raw[end:]
    after = _COMMA_AFTER.match(raw, end)
    return raw[:start] + raw[after.end() if after is not None else end :]
