"""Which headers travel, in both directions. Pure.

Invariant: hop-by-hop headers (RFC 9110, 7.6.1) never travel, nor does the client's request id towards the engine: two
clients may use the same one, and engines break on equal ids. It does not read bodies.
"""

from collections.abc import Iterable, Mapping

from multidict import CIMultiDict, CIMultiDictProxy

from . import policy

REQUEST_ID = "X-Request-Id"
REPORT = "X-Midstream-Report"
SESSION = "X-Midstream-Session"
SEED = "X-Midstream-Seed"
OUTCOME = "X-Midstream-Outcome"
TAKEOVERS = "X-Midstream-Takeovers"
STREAM = "X-Midstream-Stream"
LAST_EVENT_ID = "Last-Event-ID"
# What proves that a request comes from a gateway of the fleet.
FLEET = "X-Midstream-Fleet"
# The word for a problem of which a sidecar or gateway tells itself, so that nobody takes it for an engine's.
PROBLEM = "X-Midstream-Problem"

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The proxy answers `Expect` itself, and the client library writes `Host`.
_NOT_FORWARDED = _HOP_BY_HOP | {
    "host", "expect", REQUEST_ID.lower(), REPORT.lower(), policy.HEADER.lower(), FLEET.lower(),
}  # fmt: skip
# What is told of a session is told by whoever its client is connected to.
_OWN_WORDS = frozenset({SESSION.lower(), SEED.lower(), OUTCOME.lower(), TAKEOVERS.lower(), PROBLEM.lower()})
# A session's body is written anew, and its answer must be readable here.
_NOT_OF_A_SESSION = frozenset({"content-length", "content-encoding", "accept-encoding"})

Headers = CIMultiDictProxy[str] | CIMultiDict[str]


def towards_engine(headers: Headers) -> CIMultiDict[str]:
    """Headers of a request that is passed through."""
    return _without(headers, _NOT_FORWARDED | _named_in_connection(headers))


def of_session(headers: Headers, request_id: str) -> CIMultiDict[str]:
    """Headers of a session's request: its body is JSON of ours, and its id joins the engine's log with ours."""
    kept = _without(headers, _NOT_FORWARDED | _NOT_OF_A_SESSION | _named_in_connection(headers))
    kept["Content-Type"] = "application/json"
    kept["Accept-Encoding"] = "identity"
    kept[REQUEST_ID] = request_id
    return kept


def towards_client(headers: Headers, request_headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of an answer: the engine's, with the client's own request id in place of the inner one."""
    kept = _without(headers, _HOP_BY_HOP | {REQUEST_ID.lower()} | _named_in_connection(headers))
    return echo_request_id(kept, request_headers)


def of_answer(headers: Headers, request_headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers of a session's answer: the engine's, without what only a sidecar or gateway may say there."""
    return _without(towards_client(headers, request_headers), _OWN_WORDS)


def echo_request_id(headers: CIMultiDict[str], request_headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Add the client's request id, if it gave one."""
    outer = request_headers.get(REQUEST_ID)
    if outer is not None:
        headers[REQUEST_ID] = outer
    return headers


def _named_in_connection(headers: Headers) -> frozenset[str]:
    names = ",".join(headers.getall("Connection", []))
    return frozenset(name.strip().lower() for name in names.split(",") if name.strip())


def _without(headers: Headers, names: Iterable[str]) -> CIMultiDict[str]:
    dropped = frozenset(names)
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped:
            kept.add(name, value)
    return kept
