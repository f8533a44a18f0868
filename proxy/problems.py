"""Errors as clients see them: OpenAI's shape, a status, and when to try again. Pure but for making the response object.

Invariant: the message says the fact, then the remedy; `code` is a stable word.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web
from multidict import CIMultiDict

from ..session.errors import Refused
from .dialects import openai_edit
from .dialects.by_path import errors_of
from .dialects.responses import Responses
from .headers import PROBLEM, echo_request_id

# Unstreamed, all errors of OpenAI's APIs look alike.
_OPENAI = Responses()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that the proxy itself has to tell a client."""

    status: int
    code: str
    message: str
    kind: str = "invalid_request_error"
    retry_after_s: int | None = None

    def response(self, request_headers: Mapping[str, str], path: str = "") -> web.Response:
        """The problem as a whole answer, in the shape of the API at `path`."""
        headers: CIMultiDict[str] = CIMultiDict({PROBLEM: self.code})
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        shape = errors_of(path) or _OPENAI
        return web.Response(
            status=self.status,
            body=shape.error_body(self.kind, self.code, self.message),
            content_type="application/json",
            headers=echo_request_id(headers, request_headers),
        )

    def event(self) -> bytes:
        """The problem as the last event of a stream of OpenAI's chunks."""
        return openai_edit.error_event(self.message, self.kind, self.code)


NOT_EXACT = "not_exact"
POISON = "poison_request"
NO_LEASE = "no_lease"


def refused(error: Refused) -> Problem:
    """No worker can take a request: 503, with the coordinator's own words.

    Not for what would be sent again by itself after that, as clients do, and cost as many workers once more.
    """
    if error.reason in (NOT_EXACT, POISON):
        return Problem(422, error.reason, str(error))
    return Problem(503, error.reason, str(error), "service_unavailable", error.retry_after_s or 1)


def body_too_large(limit_bytes: int) -> Problem:
    """A request larger than the proxy reads."""
    return Problem(
        413,
        "body_too_large",
        f"the request body is larger than {limit_bytes} bytes: send less, or raise the proxy's body_bytes_max",
    )


def body_too_late(timeout_s: float) -> Problem:
    """A request whose body does not come."""
    return Problem(408, "body_too_late", f"the request body did not arrive within {timeout_s:g} s: send it again")


def private_path(path: str) -> Problem:
    """A route that the engine has for its operator."""
    return Problem(404, "private_path", f"{path} is not served to clients: ask the engine itself, from its own machine")


def not_of_the_fleet() -> Problem:
    """A request that claims to come from a gateway, and does not prove it."""
    text = "the request is signed, but not by this fleet: look at the secrets and clocks of gateway and node"
    return Problem(401, "not_of_the_fleet", text)


def bad_request(text: str) -> Problem:
    """A request that cannot be read."""
    return Problem(400, "bad_request", text)


def cannot_be_exact(obstacle: str) -> Problem:
    """A request that asks to go on exactly, with something in it that cannot."""
    return Problem(
        422,
        NOT_EXACT,
        f"a request with {str(obstacle)!r} cannot go on exactly after an interruption: leave that out, "
        "or send it with X-Midstream-Policy: best-effort",
    )


def too_many_choices(count: int, choices_max: int) -> Problem:
    """A request that asks to go on exactly, for more answers than become sessions."""
    return Problem(
        422,
        NOT_EXACT,
        f"the request asks for {count} choices, and at most {choices_max} of one request can go on exactly after an "
        "interruption: ask for fewer, raise proxy.choices_max, or send it with X-Midstream-Policy: best-effort",
    )


def not_kept(reattach_s: float) -> Problem:
    """A name of a stream that is not kept here. What never was one, and what is no more, sound alike."""
    return Problem(
        410,
        "stream_gone",
        f"no stream of that name is kept here: it was without a reader for {reattach_s:g} s, was given up for want of "
        "room, ended with this sidecar's last start, or never was; send the request again without Last-Event-ID",
    )


def out_of_reach() -> Problem:
    """A name of a stream that another of the fleet has, which does not answer."""
    return Problem(
        503,
        "stream_out_of_reach",
        "another gateway or node of the fleet has the stream, and does not answer: ask again; once it is known to be "
        "lost, with its streams, that is what the answer says",
        "service_unavailable",
        2,
    )


def no_such_position(position: int, first: int, last: int) -> Problem:
    """A stream that is kept, but not what follows the event that was named."""
    return Problem(
        416,
        "position_not_kept",
        f"what follows event {position} is not kept of this stream, only events {first} to {last}: ask for what "
        f"follows one of {first - 1} to {last}, or send the request again without Last-Event-ID",
    )


def another_request() -> Problem:
    """A name of a stream, with a request that it does not answer."""
    return Problem(
        409,
        "another_request",
        "the stream of that name answers another request: send the very request that began it, or ask for the stream "
        "with GET, or leave Last-Event-ID out",
    )


def wrong_method(method: str) -> Problem:
    """A stream can be read and given up, and nothing else."""
    return Problem(405, "wrong_method", f"a stream takes no {method}: read it with GET, or give it up with DELETE")


def upstream_lost(text: str) -> Problem:
    """A worker was lost and nobody could take over."""
    return Problem(502, "worker_lost", f"{text}; send the request again", "server_error", 1)


def too_many(requests_max: int) -> Problem:
    """More open requests than the proxy was told to hold."""
    text = f"{requests_max} requests are open, which is all that one sidecar takes: try again, or run another one"
    return Problem(503, "too_many_requests", text, "service_unavailable", 1)


def bodies_too_large(limit_bytes: int) -> Problem:
    """More bytes of bodies than the proxy holds at one time."""
    text = f"the requests that are open hold {limit_bytes} bytes, all that one sidecar keeps: try again, or send less"
    return Problem(503, "too_many_bytes", text, "service_unavailable", 1)


def too_many_connections(connections_max: int) -> Problem:
    """More connections than there are descriptors for."""
    text = f"{connections_max} connections are open: try again, or raise the limit on open files (ulimit -n)"
    return Problem(503, "too_many_connections", text, "service_unavailable", 1)
