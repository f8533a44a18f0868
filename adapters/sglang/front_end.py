"""In the HTTP process: the marker of a request on its way to the scheduler, and token ids in the answer.

Owns nothing but what it hangs on one request. SGLang's models of a request drop fields that they do not know, so the
marker is read off the raw body. Invariant: requests without a marker are SGLang's alone, and what a client writes in
the marker's place goes no further.
"""

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from ...session.marker import FIELD, NAME, Marker
from ..guard import guarded, log, patch, report
from .marking import with_marker
from .token_ids import Tap, finishes, has_ids

_TOLD = "midstream"
GENERATE_PATH = "/generate"


def install() -> None:
    """Hook OpenAI's two endpoints and the stream of outputs behind them."""
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    patch(OpenAIServingBase, "handle_request", ("self", "request", "raw_request"), _reading)
    converting = ("self", "request", "raw_request")
    patch(OpenAIServingChat, "_convert_to_internal_request", converting, _marking)
    patch(OpenAIServingCompletion, "_convert_to_internal_request", converting, _marking)
    answering = ("self", "adapted_request", "request", "raw_request")
    patch(OpenAIServingChat, "_handle_non_streaming_request", answering, _whole_with_ids)
    patch(OpenAIServingCompletion, "_handle_non_streaming_request", answering, _whole_with_ids)
    patch(TokenizerManager, "generate_request", ("self", "obj", "request"), _tapping)
    patch(OpenAIServingCompletion, "_generate_completion_stream", answering, _each_with_ids)
    patch(OpenAIServingChat, "_generate_chat_stream", answering, _end_with_ids)
    patch(OpenAIServingChat, "_generate_stream_content", ("self", "content"), _content_with_ids)


def _reading(original: Any) -> Any:
    async def handle_request(self: Any, request: Any, raw_request: Any) -> Any:
        try:
            setattr(raw_request.state, _TOLD, _marker_in(await raw_request.body()))
        except Exception:
            report("marker of a request")
        return await original(self, request, raw_request)

    return handle_request


def _marker_in(raw: bytes) -> Marker | None:
    """The marker in a request's body; None where there is none that can be read."""
    if FIELD.encode() not in raw:
        return None
    fields = json.loads(raw).get(FIELD)
    body = fields.get(NAME) if isinstance(fields, dict) else None
    if body is None:
        return None
    try:
        return Marker.from_json(body)
    except ValueError as error:
        log.warning("midstream: %s; the request runs as a new one", error)
        return None


def _marking(original: Any) -> Any:
    def _convert_to_internal_request(self: Any, request: Any, raw_request: Any = None) -> Any:
        adapted, processed = original(self, request, raw_request)
        _mark(self, adapted, raw_request)
        return adapted, processed

    return _convert_to_internal_request


@guarded(default=None)
def _mark(serving: Any, adapted: Any, raw_request: Any) -> None:
    marker = None if raw_request is None else getattr(raw_request.state, _TOLD, None)
    params = adapted.sampling_params
    if marker is None or not isinstance(params, dict):
        return
    adapted.sampling_params = with_marker(params, marker)
    adapted.return_prompt_token_ids = True
    options = serving.tokenizer_manager.server_args
    adapted.midstream = Tap(incremental=bool(options.incremental_streaming_output and adapted.stream))


def _tapping(original: Any) -> Any:
    def generate_request(self: Any, obj: Any, request: Any = None) -> Any:
        if _is_native(obj, request):
            return _marked(original, self, obj, request)
        outputs = original(self, obj, request)
        tap = getattr(obj, _TOLD, None)
        return outputs if tap is None else _tapped(self, obj, outputs, tap)

    return generate_request


@guarded(default=False)
def _is_native(asked: Any, raw_request: Any) -> bool:
    """Whether it came to SGLang's own `/generate`, whose outputs are the events."""
    if raw_request is None or raw_request.url.path != GENERATE_PATH:
        return False
    return asked.sampling_params is None or isinstance(asked.sampling_params, dict)


async def _marked(original: Any, manager: Any, asked: Any, raw_request: Any) -> AsyncIterator[Any]:
    marker = None
    try:
        marker = _marker_in(await raw_request.body())
        if marker is not None:
            asked.sampling_params = with_marker(asked.sampling_params or {}, marker)
    except Exception:
        report("marker of a request")
    try:
        async with aclosing(original(manager, asked, raw_request)) as outputs:
            async for output in outputs:
                yield output
    finally:
        if marker is not None:
            _abort(manager, asked)


async def _tapped(manager: Any, asked: Any, outputs: Any, tap: Tap) -> AsyncIterator[Any]:
    try:
        async with aclosing(outputs):
            async for output in outputs:
                try:
                    # Where this fails the stream goes on without ids, and the proxy sees that there are none.
                    tap.take(output)
                    output[_TOLD] = tap
                except Exception:
                    report("token ids of a stream")
                yield output
    finally:
        # A session whose client is gone, or that has moved on, is over now and not two seconds later.
        _abort(manager, asked)


@guarded(default=None)
def _abort(manager: Any, asked: Any) -> None:
    """Have the scheduler end a request that has not ended; SGLang knows of no other by its id any more."""
    for rid in [asked.rid] if isinstance(asked.rid, str) else asked.rid or ():
        manager.abort_request(rid)


def _each_with_ids(original: Any) -> Any:
    """Completions: one chunk for each piece of output."""

    def _generate_completion_stream(self: Any, adapted_request: Any, request: Any, raw_request: Any) -> Any:
        events = original(self, adapted_request, request, raw_request)
        tap = getattr(adapted_request, _TOLD, None)
        return events if tap is None else _written(events, tap, only_the_end=False)

    return _generate_completion_stream


def _end_with_ids(original: Any) -> Any:
    """Chats: what came with no text of its own comes with the end."""

    def _generate_chat_stream(self: Any, adapted_request: Any, request: Any, raw_request: Any) -> Any:
        events = original(self, adapted_request, request, raw_request)
        tap = getattr(adapted_request, _TOLD, None)
        return events if tap is None else _written(events, tap, only_the_end=True)

    return _generate_chat_stream


async def _written(events: Any, tap: Tap, *, only_the_end: bool) -> AsyncIterator[str]:
    async with aclosing(events):
        async for event in events:
            if not has_ids(event) and (finishes(event) or not only_the_end):
                yield tap.written(event)
            else:
                yield event


def _content_with_ids(original: Any) -> Any:
    """Chats: parsers may make several chunks of one piece of output, or none; ids come with the last of them."""

    def _generate_stream_content(self: Any, content: Any, *args: Any, **kwargs: Any) -> Any:
        events = original(self, content, *args, **kwargs)
        tap = content.get(_TOLD)
        return events if tap is None else _last_written(events, tap)

    return _generate_stream_content


async def _last_written(events: Any, tap: Tap) -> AsyncIterator[str]:
    # Nothing is waited for between chunks of one piece.
    async with aclosing(events):
        last = None
        async for event in events:
            if last is not None:
                yield last
            last = event
        if last is not None:
            yield tap.written(last)


def _whole_with_ids(original: Any) -> Any:
    """Unstreamed answers, in the words in which SGLang's server writes them."""

    async def _handle_non_streaming_request(self: Any, adapted_request: Any, request: Any, raw_request: Any) -> Any:
        answer = await original(self, adapted_request, request, raw_request)
        tap = getattr(adapted_request, _TOLD, None)
        return answer if tap is None else _whole(answer, tap)

    return _handle_non_streaming_request


def _whole(answer: Any, tap: Tap) -> Any:
    try:
        from fastapi import Response
        from fastapi.encoders import jsonable_encoder

        if not hasattr(answer, "choices"):
            return answer
        text = json.dumps(jsonable_encoder(answer), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return Response(tap.written(text), media_type="application/json")
    except Exception:
        report("token ids of an answer")
        return answer
