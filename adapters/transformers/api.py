"""HTTP in and out: OpenAI's completions and chat, streaming and not, and what a sidecar asks.

Owns the way of a request through this process: body -> Request -> token ids -> engine session -> chunks. Invariants: an
error before the first byte is a JSON error in OpenAI's shape; a session is closed whatever happens to its client, and
within a second of the client's leaving.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Middleware

from ...session.ids import session_id
from .adopt import Reservations
from .engine import Engine
from .fields import RequestError
from .job import Job, Session
from .output import Piece
from .protocol import REQUEST_ID_CHARS_MAX, Kind, Request, parse
from .responses import Head, Shape, error_body, model_list
from .text import Text

BODY_BYTES_MAX = 32 * 1024 * 1024
BODY_TIMEOUT_S = 60.0
DRAIN_RETRY_S = 5

log = logging.getLogger("midstream.transformers")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Served:
    """The model as clients see it."""

    name: str
    version: str
    created: int
    context_tokens: int
    vocab_size: int


class Api:
    """The handlers, over one engine."""

    def __init__(self, engine: Engine, text: Text, served: Served, reservations: Reservations) -> None:
        self._engine = engine
        self._text = text
        self._served = served
        self._reservations = reservations
        self.draining = False

    def application(self) -> web.Application:
        """The aiohttp application; run it with handler_cancellation, so that a client's leaving ends its handler."""
        app = web.Application(
            client_max_size=BODY_BYTES_MAX, middlewares=[cast(Middleware, web.middleware(_errors_as_json))]
        )
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/version", self._version),
                web.post("/midstream/quiesce", self._quiesce),
                web.post("/midstream/unquiesce", self._unquiesce),
                web.delete("/midstream/reservations/{session}", self._give_up),
            ]
        )
        return app

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.CHAT)

    async def _completion(self, http: web.Request) -> web.StreamResponse:
        return await self._generate(http, Kind.COMPLETION)

    async def _generate(self, http: web.Request, kind: Kind) -> web.StreamResponse:
        if self.draining:
            raise RequestError(
                "this engine is shutting down; try another or come back", status=503, retry_after_s=DRAIN_RETRY_S
            )
        request = parse(kind, await _body(http))
        if request.model not in (None, self._served.name):
            raise RequestError(
                f"the model `{request.model}` does not exist; this engine serves `{self._served.name}`",
                param="model",
                status=404,
            )
        prompt_ids = await self._text.prompt_ids(request)
        self._check_ids(request, prompt_ids)
        head = Head(_answer_id(kind, http, request), int(time.time()), self._served.name)
        name = head.id if request.marker is None else request.marker.session
        job = Job(name, prompt_ids, request.params, self._max_tokens(request, len(prompt_ids)), request.marker)
        session = self._engine.submit(job)
        try:
            decode = self._text.decoder(skip_special_tokens=False)
            shape = Shape(request, head, prompt_ids, decode)
            if request.stream:
                return await _stream(http, request, session, shape)
            return await _answer(session, shape)
        finally:
            self._engine.close(session)

    def _check_ids(self, request: Request, prompt_ids: tuple[int, ...]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty; send at least one token", param="prompt")
        resumed = () if request.marker is None or request.marker.resume is None else request.marker.resume.outputs
        vocabulary = self._served.vocab_size
        for name, ids in (
            ("prompt", prompt_ids),
            ("kv_transfer_params", resumed),
            ("logit_bias", [token for token, _ in request.params.logit_bias]),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            highest = max(ids, default=0)
            if highest >= vocabulary:
                raise RequestError(f"{name}: token id {highest} is not in a vocabulary of {vocabulary}", param=name)

    def _max_tokens(self, request: Request, prompt_len: int) -> int:
        """How many tokens the answer may have; without a wish, as many as context and pool have room for."""
        room = self._served.context_tokens - prompt_len
        wanted = request.params.max_tokens
        if room < 1 or (wanted or 0) > room:
            raise RequestError(
                f"the model's context is {self._served.context_tokens} tokens: the prompt has {prompt_len} and "
                f"max_tokens is {wanted}; shorten one of them",
                param="max_tokens",
            )
        if wanted is not None:
            return wanted
        return max(1, min(room, self._engine.capacity_tokens - prompt_len))

    async def _health(self, _: web.Request) -> web.Response:
        if not self._engine.healthy:
            return web.json_response(error_body("the decode loop has failed; restart this engine", 503), status=503)
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        served = self._served
        return web.json_response(model_list(served.name, served.created, served.context_tokens))

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": self._served.version})

    async def _quiesce(self, _: web.Request) -> web.Response:
        if not await asyncio.to_thread(self._engine.quiesce):
            raise RequestError("the step under way does not end; restart this engine", status=503)
        return web.Response(status=204)

    async def _unquiesce(self, _: web.Request) -> web.Response:
        self._engine.unquiesce()
        return web.Response(status=204)

    async def _give_up(self, http: web.Request) -> web.Response:
        try:
            session = session_id(http.match_info["session"])
        except ValueError as error:
            raise RequestError(str(error), param="session") from error
        if not self._reservations.give_up(session):
            raise RequestError(f"no blocks are reserved for session {session}", param="session", status=404)
        return web.Response(status=204)


async def _body(http: web.Request) -> object:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            raw = await http.read()
    except TimeoutError as error:
        raise RequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", status=408) from error
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


async def _stream(http: web.Request, request: Request, session: Session, shape: Shape) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    try:
        await response.prepare(http)
        opening = shape.opening()
        while True:
            pieces = await session.outbox.take()
            events = [*opening, *(_event(shape, piece) for piece in pieces)]
            opening = []
            await response.write(b"".join(map(_sse, events)))
            if pieces[-1].finish is not None:
                break
        ending = b"data: [DONE]\n\n"
        if request.include_usage and pieces[-1].error is None:
            ending = _sse(shape.usage_chunk()) + ending
        await response.write(ending)
        await response.write_eof()
    except ConnectionError:
        log.info("event=client_left session=%s", session.job.name)
    return response


async def _answer(session: Session, shape: Shape) -> web.Response:
    pieces: list[Piece] = []
    while not pieces or pieces[-1].finish is None:
        pieces.extend(await session.outbox.take())
    if pieces[-1].error is not None:
        raise RequestError(pieces[-1].error, status=500)
    return web.Response(body=_json(shape.answer(pieces)), content_type="application/json")


def _event(shape: Shape, piece: Piece) -> dict[str, Any]:
    return shape.chunk(piece) if piece.error is None else error_body(piece.error, 500)


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + _json(event) + b"\n\n"


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _answer_id(kind: Kind, http: web.Request, request: Request) -> str:
    """The id of an answer; a caller's X-Request-Id is part of it, as in vLLM."""
    given = http.headers.get("X-Request-Id") or request.request_id
    if given is not None and len(given) > REQUEST_ID_CHARS_MAX:
        raise RequestError(f"the request id has {len(given)} characters; at most {REQUEST_ID_CHARS_MAX} are allowed")
    prefix = "chatcmpl" if kind is Kind.CHAT else "cmpl"
    # A header's bytes need be no text; they come as surrogates then, which nothing else may hold.
    text = (given or uuid.uuid4().hex).encode("utf-8", "replace").decode()
    return f"{prefix}-{text}"


async def _errors_as_json(http: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(http)
    except RequestError as error:
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return web.json_response(
            error_body(str(error), error.status, error.param), status=error.status, headers=headers
        )
    except web.HTTPRequestEntityTooLarge:
        text = f"the body is larger than {BODY_BYTES_MAX} bytes; send a shorter prompt"
        return web.json_response(error_body(text, 413), status=413)
    except web.HTTPException as error:
        text = f"{http.method} {http.path}: {error.reason}"
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return web.json_response(error_body(text, error.status), status=error.status, headers=headers)
    except Exception as error:
        log.exception("event=request_failed path=%s", http.path)
        return web.json_response(error_body(f"internal error: {error!r:.200}", 500), status=500)
