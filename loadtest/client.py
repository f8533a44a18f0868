"""A client that trusts nothing: reads one streamed answer and checks it as a hostile reader would.

Shares no parser with the proxy. Owns the rules of a well-formed OpenAI stream; everything that breaks one is kept as a
violation, in words, and never repaired.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# The sidecar's own headers: its name for a session, the wish for a report, and how exact an answer has to be.
SESSION_HEADER = "X-Midstream-Session"
REPORT_HEADER = "X-Midstream-Report"
POLICY_HEADER = "X-Midstream-Policy"
EVENT_BYTES_MAX = 8 << 20
HALF = "\ufffd"
# The violation where that stands elsewhere than at the end of an answer.
HALF_A_CHARACTER = "half a character"

# What might have come in place of one token, as far as was asked: names and logprobs.
Alternatives = tuple[tuple[str, float], ...]


@dataclass(slots=True)
class Answer:
    """One answer as a client read it; `arrivals_s` are the times at which chunks with tokens came.

    `logprobs` are those of the tokens themselves, `alternatives` those of the likeliest ones beside each of them.
    `session` is the sidecar's name for it, told to who asks for a report.
    """

    status: int = 0
    session: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    report: str = ""
    comments: int = 0
    chunk_count: int = 0
    arrivals_s: list[float] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    @property
    def gap_s(self) -> float:
        """The longest silence between two chunks with tokens."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((b - a for a, b in pairs), default=0.0)

    @property
    def whole(self) -> bool:
        """Whether it ended well and nothing was wrong with it."""
        return self.sound and not self.violations

    @property
    def sound(self) -> bool:
        """Whether it ended well with nothing wrong but half a character, which a model may write undisturbed."""
        return self.done and self.error is None and not set(self.violations) - {HALF_A_CHARACTER} and bool(self.finish)

    def same_as(self, other: "Answer") -> bool:
        """Whether no reader could tell the two apart."""
        return self._seen() == other._seen()

    def _seen(self) -> tuple[Any, ...]:
        return (self.text, self.token_ids, self.logprobs, self.alternatives, self.finish, _counts(self.usage))


def _logprobs(told: dict[str, Any] | None) -> list[float]:
    """Of the tokens themselves, in the form of either API."""
    if told is None:
        return []
    return [*(told.get("token_logprobs") or ()), *(entry["logprob"] for entry in told.get("content") or ())]


def _alternatives(told: dict[str, Any] | None) -> list[Alternatives]:
    """One entry a token, in the form of either API: completions have objects, which are in no order, chats lists."""
    if told is None:
        return []
    objects = [tuple(sorted((one or {}).items())) for one in told.get("top_logprobs") or ()]
    lists = [
        tuple((top["token"], top["logprob"]) for top in entry.get("top_logprobs") or ())
        for entry in told.get("content") or ()
    ]
    return [*objects, *lists]


def _counts(usage: dict[str, Any] | None) -> tuple[Any, ...]:
    return () if usage is None else (usage.get("prompt_tokens"), usage.get("completion_tokens"))


async def read_stream(
    http: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    on_tokens: Callable[[Answer], Any] | None = None,
) -> Answer:
    """Send a streaming request with token ids and usage, and read it to its end.

    `on_tokens` is called (and awaited, if it returns an awaitable) after each chunk that brought tokens.
    """
    answer = Answer()
    rules = _Rules(answer)
    asked = {
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **body,
        "stream": True,
    }
    try:
        async with http.post(url, json=asked, headers=headers) as response:
            answer.status = response.status
            answer.session = response.headers.get(SESSION_HEADER, "")
            if response.status != 200:
                answer.error = {"status": response.status, "body": (await response.text())[:2000]}
                return answer
            before = 0
            async for event in _events(response, answer):
                rules.take(event)
                if len(answer.token_ids) > before:
                    before = len(answer.token_ids)
                    answer.arrivals_s.append(time.perf_counter())
                    waited = on_tokens(answer) if on_tokens is not None else None
                    if waited is not None:
                        await waited
    except aiohttp.ClientError as error:
        answer.violations.append(f"the connection broke: {error!r}")
    if answer.error is None and not answer.done:
        answer.violations.append("the stream ended without [DONE]")
    return answer


async def read_whole(
    http: aiohttp.ClientSession, url: str, body: dict[str, Any], *, headers: dict[str, str] | None = None
) -> Answer:
    """Send a request that is not streamed, and read its answer."""
    answer = Answer()
    async with http.post(url, json={"return_token_ids": True, **body}, headers=headers) as response:
        answer.status = response.status
        text = await response.text()
    if answer.status != 200:
        answer.error = {"status": answer.status, "body": text[:2000]}
        return answer
    whole = json.loads(text)
    if len(whole["choices"]) != 1:
        answer.violations.append(f"{len(whole['choices'])} choices")
    choice = whole["choices"][0]
    answer.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
    answer.token_ids = list(choice.get("token_ids") or ())
    answer.logprobs = _logprobs(choice.get("logprobs"))
    answer.alternatives = _alternatives(choice.get("logprobs"))
    answer.finish = choice.get("finish_reason") or ""
    answer.usage = whole.get("usage")
    answer.done = True
    return answer


async def _events(response: aiohttp.ClientResponse, answer: Answer) -> Any:
    """The `data` of each event, by the letter of the format: lines end in LF, events in an empty line."""
    rest = b""
    async for piece in response.content.iter_any():
        rest += piece
        *events, rest = rest.split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b":"):
                    answer.comments += 1
                    if line.startswith(b": midstream "):
                        answer.report = line[2:].decode()
                elif line.startswith(b"data: "):
                    yield line[6:]
                elif line and not line.startswith(b"id: "):
                    answer.violations.append(f"line {line[:80]!r} is neither data, nor an id, nor a comment")
        if len(rest) > EVENT_BYTES_MAX:
            raise aiohttp.ClientPayloadError("an event is longer than any engine sends")
    if rest.strip():
        answer.violations.append(f"the stream ends in the midst of an event: {rest[:80]!r}")


class _Rules:
    """What must hold across the chunks of one stream."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._first: dict[str, Any] = {}
        self._roles = 0

    def take(self, data: bytes) -> None:
        answer = self._answer
        if answer.done or answer.error is not None:
            answer.violations.append(f"data after the end: {data[:80]!r}")
            return
        if data == b"[DONE]":
            answer.done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            answer.violations.append(f"not JSON: {data[:80]!r}")
            return
        if "error" in chunk:
            answer.error = chunk["error"]
            return
        answer.chunk_count += 1
        for name in ("id", "model", "object"):
            if self._first.setdefault(name, chunk.get(name)) != chunk.get(name):
                answer.violations.append(f"{name} changed from {self._first[name]!r} to {chunk.get(name)!r}")
        # Of the answer, or of each chunk: engines differ. Before the first one there was none.
        created, first = chunk.get("created"), self._first.setdefault("created", chunk.get("created"))
        if created != first and not (isinstance(created, int) and isinstance(first, int) and created > first):
            answer.violations.append(f"created changed from {first!r} to {created!r}")
        if chunk.get("usage") is not None:
            if answer.usage is not None:
                answer.violations.append("a second usage")
            answer.usage = chunk["usage"]
        # Chats have it beside the choices, completions in the first one.
        answer.prompt_token_ids += chunk.get("prompt_token_ids") or ()
        for choice in chunk.get("choices", ()):
            answer.prompt_token_ids += choice.get("prompt_token_ids") or ()
            self._take_choice(choice)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        answer = self._answer
        if choice.get("index") != 0:
            answer.violations.append(f"choice {choice.get('index')}")
        if answer.finish:
            answer.violations.append("a chunk after the finish")
        delta = choice.get("delta") or {}
        if delta.get("role"):
            self._roles += 1
            if self._roles > 1:
                answer.violations.append("a second role")
        text = choice.get("text") or delta.get("content") or ""
        if answer.text.endswith(HALF) or HALF in text[:-1]:
            # Only where the answer ends, for `max_tokens` may cut a character in two.
            answer.violations.append(HALF_A_CHARACTER)
        answer.text += text
        answer.token_ids += choice.get("token_ids") or ()
        answer.logprobs += _logprobs(choice.get("logprobs"))
        answer.alternatives += _alternatives(choice.get("logprobs"))
        answer.finish = choice.get("finish_reason") or ""
