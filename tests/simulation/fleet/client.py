"""One simulated client: its request, what it has received, and whether that may be.

Owns the first invariant of all: what a client has is at every moment a prefix of one answer, token by token; it ends
whole, or with words that say that it does not, or with a connection that breaks because who it was connected to died.
Each write to it is checked as it comes.
"""

import asyncio
from collections.abc import Callable
from enum import StrEnum

import aiohttp
import msgspec
from multidict import CIMultiDict

from midstream.proxy import headers
from midstream.proxy.policy import HEADER
from midstream.proxy.report import Report
from midstream.proxy.sse import SseParser

from .http import Ask, Head
from .loop import Process
from .truth import INDEX, WIDTH, Question, token


class Broken(AssertionError):
    """What must never be. `kind` is a stable word, by which two failures are the same."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class End(StrEnum):
    """How a request ended for its client."""

    OPEN = "open"
    WHOLE = "whole"
    REFUSED = "refused"  # before anything of it came
    FAILED = "failed"  # with an error in the stream
    BROKEN = "broken"  # its gateway died
    LEFT = "left"  # by itself


# Words with which a request may be refused, or given up.
CODES = frozenset(
    {
        "no_node", "draining", "not_exact", "takeovers_exhausted", "no_worker", "takeover_timeout", "loading",
        "superseded", "still_ending", "no_lease", "poison_request",
    }
)  # fmt: skip


class SimClient:
    """`gateway` is the process that it is connected to, once it is."""

    def __init__(self, question: Question, asks_s: float, leaves_at: int | None, stalls_s: float) -> None:
        self.question = question
        self.asks_s = asks_s
        self.leaves_at = leaves_at
        self.stalls_s = stalls_s
        self.gateway: Process | None = None
        self.end = End.OPEN
        self.code = ""
        self.status = 0
        self.session = ""
        self.report: Report | None = None
        self.tokens = 0
        # Where its answer first differed from an undisturbed one.
        self.differs_at: int | None = None
        self.gaps_s: list[float] = []
        self.tries = 0
        self.task: asyncio.Task[None] | None = None
        # Nothing comes any more, and nothing is asked again.
        self.is_over = False
        self.may_write: Callable[[], bool] = lambda: True
        self._parser = SseParser()
        self._raw = bytearray()
        self._is_stream = False
        self._finish = ""
        self._is_done = False
        self._was_whole = False
        self.ended_s = 0.0

    def again(self) -> None:
        """It was refused before anything came, and asks once more."""
        self.end, self.code, self.status = End.OPEN, "", 0
        self._raw.clear()
        self._was_whole = False

    def ask(self) -> Ask:
        """The request."""
        question = self.question
        body = {
            "model": "sim", "prompt": question.prompt, "temperature": 0, "stream": question.is_streamed,
            "max_tokens": question.length if question.finish == "length" else 4096,
        }  # fmt: skip
        if question.wants_ids:
            body["return_token_ids"] = True
        told = CIMultiDict({headers.REPORT: "1", HEADER: question.policy, "Content-Type": "application/json"})
        return Ask("POST", "/v1/completions", told, msgspec.json.encode(body))

    # ---- the sink of its gateway

    def head(self, head: Head) -> None:
        self._require_alive()
        self.status = head.status
        self.session = head.headers.get(headers.SESSION, "")
        self._is_stream = head.headers.get("Content-Type", "").startswith("text/event-stream")
        if not self._is_stream:
            self.report = Report.of_headers(head.headers)

    async def write(self, data: bytes) -> None:
        self._require_alive()
        if not self._is_stream:
            self._raw += data
            return
        for event in self._parser.feed(data):
            self._take(event.raw, event.data)
        if self.leaves_at is not None and self.tokens >= self.leaves_at and self.end is End.OPEN:
            self.end = End.LEFT
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")
        if self.stalls_s:
            await asyncio.sleep(self.stalls_s)

    def eof(self) -> None:
        if self.gateway is None or not self.gateway.is_alive:
            return
        self._was_whole = True

    def abort(self) -> None:
        """Its gateway broke it off."""

    def ended(self) -> None:
        """Nothing comes any more: what does it come to?"""
        question = self.question
        if self.end is not End.OPEN:
            return
        self.ended_s = asyncio.get_running_loop().time()
        if not self._is_stream and self.status == 200 and self._was_whole:
            self._take_whole()
            return
        if self.status and self.status != 200:
            self.end = End.REFUSED
            self._note_error(msgspec.json.decode(bytes(self._raw)).get("error"))
            return
        if self._is_done:
            if self.tokens != question.length or self._finish != question.finish:
                raise self.broken("lost", f"it ended after {self.tokens} of {question.length} with {self._finish!r}")
            self.end = End.WHOLE
        elif self.code:
            self.end = End.FAILED
        elif self.gateway is not None and not self.gateway.is_alive:
            self.end = End.BROKEN
        else:
            raise self.broken("silent-end", f"its stream ended after {self.tokens} of {question.length} without a word")

    def broken(self, kind: str, text: str) -> Broken:
        """What is wrong, and with whom."""
        return Broken(kind, f"question {self.question.number} session {self.session}: {text}")

    # ---- inside

    def _require_alive(self) -> None:
        if self.gateway is None or not self.gateway.is_alive or self.end is End.LEFT:
            raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    def _take(self, raw: bytes, data: bytes | None) -> None:
        if data is None:
            report = Report.of_comment(raw)
            if report is not None:
                self.report = report
            return
        if self._is_done:
            raise self.broken("after-the-end", f"{raw[:80]!r} came after [DONE]")
        if data == b"[DONE]":
            self._is_done = True
            return
        chunk = msgspec.json.decode(data)
        if chunk.get("error") is not None:
            self._note_error(chunk["error"])
            return
        choice = chunk["choices"][0]
        said = choice["text"]
        values = [int(said[at : at + WIDTH]) for at in range(0, len(said), WIDTH)]
        if self.question.wants_ids and choice.get("token_ids") != values:
            raise self.broken("ids", f"text {said!r} came with the ids {choice.get('token_ids')}")
        self._take_tokens(values)
        if choice["finish_reason"] is not None:
            if self._finish:
                raise self.broken("two-ends", f"it finished with {self._finish} and {choice['finish_reason']}")
            self._finish = choice["finish_reason"]

    def _take_tokens(self, values: list[int]) -> None:
        question = self.question
        for value in values:
            if value // INDEX != self.tokens:
                raise self.broken("order", f"output {self.tokens} is {value}")
            if self.differs_at is None and value != token(question, self.tokens, 0):
                self.differs_at = self.tokens
            self.tokens += 1
        if self.tokens > question.length:
            raise self.broken("too-long", f"it has {self.tokens} outputs of {question.length}")

    def _take_whole(self) -> None:
        choice = msgspec.json.decode(bytes(self._raw))["choices"][0]
        said = choice["text"]
        self._take_tokens([int(said[at : at + WIDTH]) for at in range(0, len(said), WIDTH)])
        self._finish = choice["finish_reason"]
        if self.tokens != self.question.length or self._finish != self.question.finish:
            raise self.broken("lost", f"it has {self.tokens} of {self.question.length} with {self._finish!r}")
        self.end = End.WHOLE

    def _note_error(self, error: object) -> None:
        if not isinstance(error, dict) or not error.get("code") or not error.get("message"):
            raise self.broken("words", f"{error!r} says nothing")
        self.code = str(error["code"])
        if self.code not in CODES:
            raise self.broken("words", f"it was given up with {error}")
