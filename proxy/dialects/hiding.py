"""Takes token ids out of an engine's bytes again, where the client did not ask for them.

Invariant: every other byte stays as the engine sent it, and the result is what the engine would have sent had nobody
asked. Works on raw bytes (an SSE event or a JSON body), so nothing is decoded and encoded again.
"""

import re
from enum import StrEnum

# `"token_ids":[1,2]` in raw JSON can only be a key and its value: within a string its quotes would be escaped, so the
# opening quote would follow a backslash. A string that ends before `token_ids"` (its closing quote taken for the
# opening one) would be followed by a comma, a colon or a bracket and never by a letter.
_KEY = rb'(?<!\\)"(?:prompt_)?token_ids"\s*:\s*'
_LIST = _KEY + rb"\[[\d,\s]*\]"
_AS_NULL = re.compile(rb"(" + _KEY + rb")\[[\d,\s]*\]")
_ABSENT = re.compile(rb",\s*" + _LIST + rb"|" + _LIST + rb"\s*,\s*|" + _LIST)


class Hiding(StrEnum):
    """What the engine writes in the place of token ids that were not asked for.

    vLLM 0.32 writes null wherever it would have written the ids: its chunks leave out only fields that were never set,
    and these are set to None (`entrypoints/openai/*/serving.py`); its unstreamed answers write all fields.
    """

    NULL = "null"
    ABSENT = "absent"


def hide_ids(raw: bytes, hiding: Hiding) -> bytes:
    """`raw` without the ids of output and prompt."""
    if hiding is Hiding.NULL:
        return _AS_NULL.sub(rb"\1null", raw)
    return _ABSENT.sub(b"", raw)
