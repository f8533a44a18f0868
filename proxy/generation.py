"""What the streamed and the unstreamed handler share: one session's request, on its way to workers.

Owns nothing that changes, but for the session's failover. Invariant: every attempt sends the same request, but for the
marker. It does not read answers.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from . import headers, policy
from .coordinator import Placement, SessionFacts
from .failover import Failover
from .kept import Kept
from .orphans import Origin
from .policy import Policy
from .request import Outgoing
from .settings import ProxySettings
from .splice import Wishes
from .upstream import Upstream, target, unless_interrupted

# The obstacle of what is no session but a question about a prompt: it needs no KV, and carries no marker.
OF_A_PROMPT = "about_prompt"


@dataclass(frozen=True, slots=True)
class Generation:
    """One session as the handlers see it."""

    request: web.Request
    raw_path: str
    facts: SessionFacts
    wishes: Wishes
    outgoing: Outgoing
    failover: Failover
    upstream: Upstream
    settings: ProxySettings
    kept: Kept
    # Its client is a gateway, which counts on being told of takeovers here.
    of_gateway: bool = False
    # The stream that its answer becomes, where another gateway could go on with it.
    origin: Origin | None = None
    # Whether nothing of that stream was said before.
    is_new: Callable[[], bool] | None = None
    # Raises while its client has more of that stream than was heard here: nobody but its node can go on with it then.
    require_all_heard: Callable[[], None] | None = None
    # Tells a node, at its base URL, that nothing of this is to be kept.
    forget: Callable[[str], None] | None = None

    async def send(self, placement: Placement) -> aiohttp.ClientResponse:
        """Send the request to a worker. Raises UpstreamLost, also when the coordinator has news meanwhile."""
        return await unless_interrupted(self._send(placement), placement.interrupted, self.kept)

    async def _send(self, placement: Placement) -> aiohttp.ClientResponse:
        # Requests come one by one, takeovers by the dozen. The head of an unstreamed answer does not tell when the
        # request was read.
        marker = placement.marker
        goes_on = marker.generation > self.facts.generation + 1 or marker.resume is not None
        sent = headers.of_session(self.request.headers, _request_id(placement))
        if placement.is_node:
            sent[policy.HEADER] = self._policy_at_node()
            sent[headers.REPORT] = "1"
        # A node has turns of its own, one after the other at each of its workers.
        many = goes_on and self.facts.stream and not placement.is_node
        async with self.upstream.turns.at(placement.base_url, placement.front_ends) if many else nullcontext():
            return await self.upstream.request(
                "POST",
                target(placement.base_url, self.raw_path),
                sent,
                self.outgoing.encode(None if self.facts.exact_obstacle else marker, self._origin_for(placement)),
                proven=placement.is_node,
            )

    def _origin_for(self, placement: Placement) -> Origin | None:
        """Of what a second node writes, that has only the rest, nobody could make the same stream."""
        if self.origin is None or not placement.is_node or placement.marker.resume is not None:
            return None
        if self.is_new is None or not self.is_new():
            return None
        return replace(self.origin, adopts=placement.adopts)

    def left(self, placement: Placement) -> None:
        """The node's answer is not wanted any more: it is not to be kept there for another gateway."""
        if self.forget is not None and placement.is_node:
            self.forget(placement.base_url)

    def _policy_at_node(self) -> str:
        # A question about a prompt is to reach the engine as it is.
        return (Policy.OFF if self.facts.exact_obstacle == OF_A_PROMPT else self.facts.policy).value

    @property
    def wants_report(self) -> bool:
        """Whether the client asked for a trailer that tells what happened."""
        return self.request.headers.get(headers.REPORT) == "1"

    def tell_session(self, answer: CIMultiDict[str]) -> None:
        """Name the session, and the seed that was drawn for it, in an answer's headers, for a client that asked."""
        if self.wants_report:
            answer[headers.SESSION] = self.facts.session
            if self.facts.seed is not None:
                answer[headers.SEED] = str(self.facts.seed)


def _request_id(placement: Placement) -> str:
    """The inner request's id: engines break on equal ones, and after a move both owners may run in one engine."""
    marker = placement.marker
    return marker.session if marker.generation == 1 else f"{marker.session}-{marker.generation}"
