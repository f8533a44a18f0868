"""Finds streams whose gateway is no more at the nodes that keep them, and claims their sessions.

Owns the search and the claim. Invariants: nobody goes on with a stream whose gateway is not known to be over, nor with
one that another gateway has claimed, nor with what a node kept of a session that went on elsewhere since; a stream is
asked for by its digest, so who has its name alone gets nothing; each node is asked once, for a bounded time; a node
or a service that is silent is a refusal and no guess; names of gateways that were never seen from here, which anybody
can invent, take no search from others. How a stream is made again of what its node kept is the proxy's
(`proxy/orphans.py`).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
from yarl import URL

from ...proxy.coordinator import Placement, SessionFacts
from ...proxy.event_ids import prefix_of
from ...proxy.orphans import LOOK, KeptPart, Orphan, code_of_this, part_from
from ...proxy.permission import Permission
from ...proxy.reattach_elsewhere import SENT_ON, STREAMS_PATH
from ...session.errors import MidstreamError, Refused
from ...session.ids import Generation
from ..fleet.coordination import ClaimAnswer, Verdict
from ..fleet.record import MemberId, lease_s_of
from ..fleet_standing import Standing
from ..fleet_streams import FleetStreams, prefix_of_member
from .answers import bounded_text
from .coordinator import GatewayCoordinator
from .nodes import Node

_LOG = logging.getLogger("midstream.gateway")

ANSWER_S = 2.0
_ANSWER_BYTES_MAX = 16 << 10
# Nodes of a search that are asked at the same time, and searches: all clients of a gateway come back at once.
_AT_ONCE = 8
_SEARCHES_AT_ONCE = 16
_SEARCH_S = 20.0
# For gateways that were over before this process began, and for what is none: these and no more.
_UNSEEN_AT_ONCE = 2
_UNSEEN_WAITING_MAX = 64
# A node that did not answer is asked after the others for so long: each search would wait for it.
_SILENT_S = 10.0


class Adoption:
    """Of one gateway. Use as a context."""

    def __init__(self, standing: Standing, streams: FleetStreams, coordinator: GatewayCoordinator) -> None:
        self._standing = standing
        self._streams = streams
        self._coordinator = coordinator
        self._searches = asyncio.Semaphore(_SEARCHES_AT_ONCE)
        self._searches_unseen = asyncio.Semaphore(_UNSEEN_AT_ONCE)
        self._waiting_unseen = 0
        self._silent_until_s: dict[str, float] = {}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Adoption":
        connector = aiohttp.TCPConnector(limit=_AT_ONCE * _SEARCHES_AT_ONCE, ssl=self._streams.tls or True)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    # ---- asked by the proxy

    async def adopt(self, token: str, digest: str) -> Orphan | str | None:
        """The stream, which is this gateway's from now on; where it is, if another has taken it up; None: nowhere."""
        try:
            async with asyncio.timeout(_SEARCH_S), self._search(prefix_of(token)):
                found = await self._found(token)
        except TimeoutError:
            raise _out_of_reach("too many streams are looked for at the same time") from None
        if found is None:
            return None
        node, part = found
        if part.origin.digest != digest or part.origin.code != code_of_this() or part.origin.token != token:
            return None
        owner = _member(part.origin.owner)
        if owner is None:
            return None
        claimed = await self._claimed(part, owner)
        if claimed is None:
            return None
        answer, permission = claimed
        if answer.verdict is Verdict.WON:
            _LOG.info("event=adopted session=%s node=%s former=%s", part.session, node, owner)
            return Orphan(part.origin, part.session, part.generation, part.seed, node, permission)
        if answer.verdict is Verdict.TAKEN and answer.holder is not None:
            url = await self._streams.base_url_of(prefix_of_member(answer.holder.owner))
            if url is not None:
                return url
        raise _out_of_reach(f"{owner} may have the stream still")

    def place(self, facts: SessionFacts, orphan: Orphan) -> Placement:
        """At the node that has it."""
        return self._coordinator.adopted(facts, orphan.node, orphan.generation)

    # ---- the search and the claim

    @asynccontextmanager
    async def _search(self, prefix: str) -> AsyncIterator[None]:
        """One of those that go on at a time. Raises Refused."""
        if self._streams.has_seen(prefix):
            async with self._searches:
                yield
            return
        if self._waiting_unseen >= _UNSEEN_WAITING_MAX:
            raise _out_of_reach("a gateway has it that was never seen from here, and many such are looked for")
        self._waiting_unseen += 1
        try:
            async with self._searches_unseen:
                yield
        finally:
            self._waiting_unseen -= 1

    async def _found(self, token: str) -> tuple[str, KeptPart] | None:
        known = self._coordinator.nodes.all()
        nodes = [node for node in known if node.record is not None]
        now_s = time.monotonic()
        self._silent_until_s = {node: until_s for node, until_s in self._silent_until_s.items() if until_s > now_s}
        silent = [node for node in nodes if node.id in self._silent_until_s]
        others = [node for node in nodes if node.id not in self._silent_until_s]
        for several in (*_in_batches(others), *_in_batches(silent)):
            answers = await asyncio.gather(*(self._ask(node, token) for node in several))
            found = _newest(answer for answer in answers if answer is not None)
            if found is not None:
                return found
        if len(nodes) < len(known) or not nodes or any(node.id in self._silent_until_s for node in nodes):
            # That nobody has it is a last word: it takes the word of all.
            raise _out_of_reach("the node that keeps the stream may be one that cannot be asked now")
        return None

    async def _ask(self, node: Node, token: str) -> tuple[str, KeptPart] | None:
        assert self._http is not None, "use it as a context"
        path = STREAMS_PATH + token
        url = URL(node.url + path, encoded=True)
        sent = {SENT_ON: self._streams.vouch("GET", url.raw_path_qs, b""), LOOK: "1"}
        try:
            async with self._http.get(url, headers=sent, allow_redirects=False) as answer:
                text = await bounded_text(answer, _ANSWER_BYTES_MAX)
                found = (node.id, part_from(msgspec.json.decode(text))) if answer.status == 200 else None
                if answer.status == 401 or answer.status >= 500:
                    raise ValueError(f"it answered {answer.status}")
                self._silent_until_s.pop(node.id, None)
                return found
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.DecodeError) as error:
            self._silent_until_s[node.id] = time.monotonic() + _SILENT_S
            # Not the text, which may have the URL, and with that the token.
            _LOG.info("event=not_asked node=%s error=%s", node.id, type(error).__name__)
            return None

    async def _claimed(self, part: KeptPart, owner: MemberId) -> tuple[ClaimAnswer, Permission] | None:
        """What comes of the claim, and by which the stream goes if it is won: that of the very lease that claims it.

        None where the session had a later owner than the one that has kept this.
        """
        membership = self._standing.membership
        if membership is None:
            raise _out_of_reach("this gateway has no place in its fleet yet")
        try:
            held = await self._standing.coordination.holder(part.session)
            if held is not None and held.generation > part.generation:
                return None
        except MidstreamError as error:
            raise _out_of_reach(f"who has the stream cannot be found out now ({error})") from error
        permission = self._standing.claiming(membership, part.session, Generation(part.generation))
        try:
            return await membership.claim(part.session, Generation(part.generation), owner), permission
        except MidstreamError as error:
            permission.ended()
            raise _out_of_reach(f"who has the stream cannot be found out now ({error})") from error
        except asyncio.CancelledError:
            # It may have been won all the same, and nobody is there to have it.
            permission.ended()
            raise


def _out_of_reach(why: str) -> Refused:
    return Refused("stream_out_of_reach", f"{why}; ask again", retry_after_s=2)


def _in_batches(nodes: list[Node]) -> list[list[Node]]:
    """Those that are asked at the same time."""
    return [nodes[index : index + _AT_ONCE] for index in range(0, len(nodes), _AT_ONCE)]


def _newest(answers: Iterable[tuple[str, KeptPart]]) -> tuple[str, KeptPart] | None:
    """Of several nodes that keep parts of a stream the one that had it last."""
    return max(answers, key=lambda answer: answer[1].generation, default=None)


def _member(text: str) -> MemberId | None:
    try:
        lease_s_of(text)
    except ValueError:
        return None
    return MemberId(text)
