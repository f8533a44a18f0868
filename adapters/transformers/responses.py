"""What clients read: chunks, answers, usage and errors in the exact shapes of OpenAI (and vLLM's token ids). Pure.

One `Shape` a request. It keeps only what shapes need from one chunk to the next (text offsets, counts) and decides
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .detokenizer import Decode
from .output import Piece, TokenLogprobs
from .protocol import Kind, Request

_OBJECTS = {
    (Kind.CHAT, True): "chat.completion.chunk",
    (Kind.CHAT, False): "chat.completion",
    (Kind.COMPLETION, True): "text_completion",
    (Kind.COMPLETION, False): "text_completion",
}
_ERROR_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestEntityTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of an answer share."""

    id: str
    created: int
    model: str


class Shape:
    """Turns the pieces of one session into JSON objects."""

    def __init__(self, request: Request, head: Head, prompt_ids: Sequence[int], decode: Decode) -> None:
        self._request = request
        self._head = head
        self._prompt_ids = list(prompt_ids)
        self._decode = decode
        self._count = 0
        self._offset = 0
        self._first = True

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before the first piece: chat names the role."""
        if self._request.kind is not Kind.CHAT:
            return []
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self._envelope(choice, stream=True)
        if self._request.return_token_ids:
            chunk["prompt_token_ids"] = self._prompt_ids
        if self._request.continuous_usage:
            chunk["usage"] = self._usage()
        return [chunk]

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of one piece."""
        chat = self._request.kind is Kind.CHAT
        self._count += len(piece.token_ids)
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": piece.text}} if chat else {"text": piece.text}
        choice["logprobs"] = self._logprobs(piece.logprobs)
        if piece.logprobs is None and self._request.params.logprobs is not None:
            # Tokens of before a failover: theirs are not known here, but where the text goes on is.
            self._offset += sum(len(self._token(token)) for token in piece.token_ids)
        choice["finish_reason"] = None if piece.finish is None else piece.finish.value
        if piece.finish is not None or not chat:
            choice["stop_reason"] = piece.stop_reason
        if self._request.return_token_ids:
            if not chat:
                choice["prompt_token_ids"] = self._prompt_ids if self._first else None
            choice["token_ids"] = list(piece.token_ids)
        self._first = False
        chunk = self._envelope(choice, stream=True)
        if self._request.continuous_usage:
            chunk["usage"] = self._usage()
        return chunk

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        return {**self._envelope(None, stream=True), "usage": self._usage()}

    def answer(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole answer of a request that does not stream."""
        chat = self._request.kind is Kind.CHAT
        text = "".join(piece.text for piece in pieces)
        ids = [token for piece in pieces for token in piece.token_ids]
        last = pieces[-1]
        self._count = len(ids)
        entries = [entry for piece in pieces for entry in piece.logprobs or ()]
        # After a failover the log probabilities of replayed tokens are not known here; half a list would mislead.
        whole = tuple(entries) if self._request.params.logprobs is not None and len(entries) == len(ids) else None
        choice: dict[str, Any] = {"index": 0}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice["logprobs"] = self._logprobs(whole)
        choice["finish_reason"] = None if last.finish is None else last.finish.value
        choice["stop_reason"] = last.stop_reason
        body = self._envelope(choice, stream=False)
        if self._request.return_token_ids:
            choice["token_ids"] = ids
            (body if chat else choice)["prompt_token_ids"] = self._prompt_ids
        body["usage"] = self._usage()
        return body

    def _envelope(self, choice: dict[str, Any] | None, *, stream: bool) -> dict[str, Any]:
        return {
            "id": self._head.id,
            "object": _OBJECTS[self._request.kind, stream],
            "created": self._head.created,
            "model": self._head.model,
            "choices": [] if choice is None else [choice],
        }

    def _usage(self) -> dict[str, int]:
        prompt = len(self._prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": self._count, "total_tokens": prompt + self._count}

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._request.tokens_as_ids else self._decode([token])

    def _logprobs(self, entries: tuple[TokenLogprobs, ...] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        if self._request.kind is Kind.CHAT:
            return {
                "content": [
                    {
                        **self._entry(e.token, e.logprob),
                        "top_logprobs": [self._entry(*pair) for pair in e.top],
                    }
                    for e in entries
                ]
            }
        tokens, offsets = [], []
        for entry in entries:
            tokens.append(self._token(entry.token))
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(e.logprob) for e in entries],
            "tokens": tokens,
            # The sampled token is always among them, as vLLM does.
            "top_logprobs": [{self._token(t): _finite(p) for t, p in (*e.top, (e.token, e.logprob))} for e in entries],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    """JSON has no infinity: a token that could not be is given the value that OpenAI gives it."""
    return max(logprob, -9999.0)


def error_body(text: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error as OpenAI clients read it."""
    kind = _ERROR_TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}


def model_list(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    """The answer of /v1/models."""
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "midstream",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
    }
    return {"object": "list", "data": [card]}
