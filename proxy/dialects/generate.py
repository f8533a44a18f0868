"""`/generate`: a stream whose events tell the answer so far, or what came since the last one, with token ids. Pure.

Owns reading and writing of these events. Which of the two a stream is, is an option of the engine and stands in no
event: `completion_tokens` counts all outputs, so an event's ids are the last ones of that many. An error has OpenAI's
shape.
"""

from typing import Annotated, Any

import msgspec

from ..sse import encode_event
from .events import decoded

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Reason(msgspec.Struct, gc=False):
    """Why an answer has ended."""

    type: str | None = None


class Meta(msgspec.Struct):
    """What counts of an event's `meta_info`."""

    id: str | None = None
    finish_reason: Reason | None = None
    completion_tokens: int = 0


class Output(msgspec.Struct):
    """One event."""

    text: str | None = None
    output_ids: list[TokenId] | None = None
    meta_info: Meta | None = None
    error: dict[str, Any] | str | None = None


_decoder = msgspec.json.Decoder(Output)


class Generate:
    """The dialect of `/generate`, as far as handlers ask for it; its streams have a splicer of their own."""

    hides_aborts = False
    # Seeds stand in an object of the request, under a name that not all engines have.
    takes_seed = False

    def gave_up(self, body: bytes) -> bool:
        """Whether an unstreamed answer says that the engine did not finish it."""
        meta = (decoded(body) or {}).get("meta_info")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        return isinstance(reason, dict) and reason.get("type") == "abort"

    def error_body(self, kind: str, code: str, message: str) -> bytes:
        """An error of the proxy's own as a whole answer."""
        return msgspec.json.encode({"error": {"message": message, "type": kind, "code": code}})

    def error_event(self, kind: str, code: str, message: str, sequence: int) -> bytes:
        """The same as the last event of a stream."""
        return encode_event(self.error_body(kind, code, message))


def decode_output(data: bytes) -> Output | None:
    """Read the data of an event; None if it is none of this dialect."""
    try:
        output = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if output.error is None and (output.text is None or output.output_ids is None or output.meta_info is None):
        return None
    return output


def rewritten(data: bytes, *, text: str, ids: list[int], name: str | None) -> bytes:
    """An event with this text, these ids, and the stream's name; all else is the engine's that wrote it."""
    body: dict[str, Any] = msgspec.json.decode(data)
    body["text"], body["output_ids"] = text, ids
    if name is not None:
        body["meta_info"]["id"] = name
    return encode_event(msgspec.json.encode(body))
