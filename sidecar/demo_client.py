"""The demo's client: reads a streamed answer as any client would, and shares no code with the proxy that it watches."""

import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from ..session.errors import EngineError

LINE_BYTES_MAX = 1 << 20


@dataclass(slots=True)
class Answer:
    """One streamed answer. `arrivals_s` are the times at which chunks with tokens came."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def gap_ms(self) -> float:
        """The longest silence between two chunks."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return round(max((b - a for a, b in pairs), default=0.0) * 1000, 1)

    def is_same(self, other: "Answer") -> bool:
        """Whether a reader could tell two answers apart: by text, ids, ending or usage."""
        mine = (self.text, self.token_ids, self.finish, self.usage)
        return mine == (other.text, other.token_ids, other.finish, other.usage)


def read_stream(url: str, body: dict[str, Any], timeout_s: float) -> Iterator[Answer]:
    """Send a chat request and yield the answer as it grows. EngineError when it ends in any way but a good one."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    answer = Answer()
    try:
        connection.request("POST", parts.path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise EngineError(f"the request was answered with {response.status}: {response.read(500)!r}")
        while line := response.readline(LINE_BYTES_MAX):
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return
            _take(answer, json.loads(line[6:]))
            yield answer
        raise EngineError("the stream ended without [DONE]")
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"the stream broke: {error!r}") from error
    finally:
        connection.close()


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if "error" in event:
        raise EngineError(f"the answer ended with an error: {event['error']}")
    answer.usage = event.get("usage") or answer.usage
    for choice in event.get("choices", ()):
        answer.text += (choice.get("delta") or {}).get("content") or ""
        answer.finish = choice.get("finish_reason") or answer.finish
        if ids := choice.get("token_ids"):
            answer.token_ids += ids
            answer.arrivals_s.append(perf_counter())


def lost_and_duplicated(wanted: Sequence[int], got: Sequence[int]) -> tuple[int, int]:
    """How many of the wanted tokens are missing, and how many tokens are there that should not be."""
    lost = extra = 0
    for kind, i1, i2, j1, j2 in SequenceMatcher(None, wanted, got, autojunk=False).get_opcodes():
        if kind != "equal":
            lost += i2 - i1
            extra += j2 - j1
    return lost, extra
