"""A scripted engine that speaks the APIs whose streams carry no token ids: Responses and Messages.

It is `scripted`'s engine with other answers: the same scripts, journals, markers and fates. A token of it is a piece of
an item (support/event_answers.py); its ids count from 1000.
"""

import asyncio
import json
from typing import Any

from aiohttp import web

from .answers import Answer
from .event_answers import EventAnswer, Told, messages_events, responses_events, whole_message, whole_response
from .scripted import Fate, Script, ScriptedEngine, _kill

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


class EventEngine(ScriptedEngine):
    """One worker."""

    def __init__(self, told: EventAnswer, *scripts: Script, name: str = "w") -> None:
        super().__init__(Answer.words(told.count), *scripts, name=name)
        self.told = told
        # How long a resumed request waits for its KV, after its replay.
        self.kv_wait_s = 0.0
        # From this token on it says nothing until its answer is complete, as parsers that hold a call back.
        self.mute_from: int | None = None

    @property
    def letter(self) -> str:
        """What this engine's names hold."""
        return self.name[-1]

    async def _echo(self, request: web.Request) -> web.Response:
        if request.path in (RESPONSES, MESSAGES):
            return await self._speak(request)  # type: ignore[return-value]
        return await super()._echo(request)

    async def _speak(self, request: web.Request) -> web.StreamResponse:
        script, seen, refusal = await self._begin(request)
        if refusal is not None:
            return refusal
        body = seen.body
        marker = (body.get("kv_transfer_params") or {}).get("midstream") or {}
        try:
            if body.get("stream"):
                return await self._tell(request, script, marker)
            return await self._tell_whole(request, script, marker)
        except asyncio.CancelledError:
            seen.cancelled.set()
            raise

    def events(self, path: str, replayed: int = 0, abort_after: int | None = None) -> list[Told]:
        """The events of the whole answer."""
        if path == MESSAGES:
            return messages_events(self.told, self.letter, replayed=replayed, abort_after=abort_after)
        when = 1700000000 + ord(self.letter)
        return responses_events(self.told, self.letter, replayed=replayed, seed_time=when, abort_after=abort_after)

    async def _tell(self, request: web.Request, script: Script, marker: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        outputs = (marker.get("resume") or {}).get("outputs") or []
        journal = self.journals.setdefault(marker.get("session", ""), [])
        journal[:] = outputs
        events = self.events(request.path, len(outputs))
        ending = _last_text(events)
        held: list[bytes] = []
        for index, event in enumerate(events):
            dies_in_ending = script.at is not None and script.at >= self.told.count and index > ending
            if script.at is not None and (event.after > script.at or dies_in_ending):
                return await self._end_badly(request, response, script, journal, marker)
            if event.after > len(journal):
                if outputs and len(journal) == len(outputs):
                    await asyncio.sleep(self.kv_wait_s)
                journal.extend(self.answer.ids[len(journal) : event.after])
                await asyncio.sleep(script.gap_s)
            if self.mute_from is not None and self.mute_from < event.after:
                held.append(event.raw)
            else:
                await response.write(event.raw)
        await response.write(b"".join(held))
        await response.write_eof()
        return response

    async def _end_badly(
        self,
        request: web.Request,
        response: web.StreamResponse,
        script: Script,
        journal: list[int],
        marker: dict[str, Any],
    ) -> web.StreamResponse:
        sent = len(journal)
        journal.extend(self.answer.ids[sent : sent + script.ahead])
        self.meets_fate.set()
        match script.fate:
            case Fate.STALLS:
                await asyncio.sleep(3600)
            case Fate.ABORTS:
                self.given_up.add(marker.get("session", ""))
                told = self.events(request.path, sent, abort_after=sent)
                await response.write(b"".join(event.raw for event in told[_last_text(told) + 1 :]))
            case Fate.ERRS if request.path == MESSAGES:
                error = {"type": "error", "error": {"type": "internal_error", "message": "EngineCore died"}}
                await response.write(b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n")
            case Fate.DIES | Fate.ERRS:
                await asyncio.sleep(0.02)
                _kill(request)
            case Fate.ENDS:
                pass
        await response.write_eof()
        return response

    async def _tell_whole(self, request: web.Request, script: Script, marker: dict[str, Any]) -> web.Response:
        journal = self.journals.setdefault(marker.get("session", ""), [])
        aborts = script.at is not None and script.fate is Fate.ABORTS
        if script.at is not None:
            journal[:] = self.answer.ids[: script.at + script.ahead]
            if not aborts:
                _kill(request)
            self.given_up.add(marker.get("session", ""))
        if request.path == MESSAGES:
            body = whole_message(self.told, self.letter, aborted=aborts)
        else:
            body = whole_response(self.told, self.letter)
        return web.Response(body=body, content_type="application/json")


def _last_text(events: list[Told]) -> int:
    texts = ("output_text", "reasoning_text", "function_call_arguments")
    kinds = {"content_block_delta", *(f"response.{text}.delta" for text in texts)}
    return max((i for i, event in enumerate(events) if event.body["type"] in kinds), default=0)
