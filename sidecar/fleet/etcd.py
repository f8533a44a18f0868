"""A fleet in etcd (v3).

Owns how members and claims lie there: `/midstream/<fleet>/members/<member>` holds the record and goes with the member's
lease, whose number is drawn with the member's id; `/midstream/<fleet>/claims/<session>` holds owner and generation of a
session and goes with nobody's, for a lease can be revoked while its owner still sends. Every write is a transaction on
what was there. Renewals are two small requests: the lease is renewed, then the entry is read by a quorum, without which
a leader that was voted out could renew what is not there any more.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ...session.errors import CoordinationError, LeaseLost, MidstreamError
from ...session.ids import Generation, SessionId, session_id
from .coordination import MEMBERS_MAX, Claim
from .etcd_http import EtcdAccess, EtcdFault, EtcdHttp
from .lease_service import (
    SWEEP_MAX,
    Change,
    Current,
    Entry,
    Gone,
    LeaseService,
    Put,
    Renewals,
    Whole,
    bounded,
)
from .record import MemberId, lease_s_of, member_name

_PAGE = 1000


class EtcdService(LeaseService):
    """One fleet in etcd."""

    name = "etcd"
    renewals = Renewals.UNSEEN

    def __init__(self, access: EtcdAccess, fleet: str) -> None:
        self._etcd = EtcdHttp(access)
        root = f"/midstream/{member_name(fleet)}"
        self._members = f"{root}/members/"
        self._claims = f"{root}/claims/"

    async def create(self, member: MemberId, entry: str) -> float:
        """A lease and an entry for a new member."""
        lease_s = lease_s_of(member)
        granted_s = float(lease_s)
        try:
            answer = await self._etcd.call("lease/grant", {"ID": _lease_of(member), "TTL": lease_s})
            granted_s = float(answer.get("TTL", 0))
        except EtcdFault as fault:
            if not fault.is_precondition:  # else it was granted, and the answer was lost
                raise
        key = self._members + member
        done = await self._if([_is_absent(key)], [_put(key, entry, _lease_of(member))])
        if not done.get("succeeded"):
            raise CoordinationError(f"etcd: {key} is there already; join again")
        return granted_s

    async def renew(self, member: MemberId) -> float:
        """Renew, and see that the entry is there."""
        answer = await self._etcd.call("lease/keepalive", {"ID": _lease_of(member)})
        granted_s = float(answer.get("TTL", 0))
        if granted_s <= 0:
            raise LeaseLost(f"etcd: the lease of {member} is over; join again")
        if not await self.is_there(member):
            raise LeaseLost(f"etcd: the entry of {member} is gone; join again")
        return granted_s

    async def write(self, member: MemberId, entry: str) -> None:
        """Change the entry."""
        key = self._members + member
        try:
            done = await self._if([_is_there(key)], [_put(key, entry, _lease_of(member))])
        except EtcdFault as fault:
            if fault.is_not_found:
                raise LeaseLost(f"etcd: the lease of {member} is over; join again") from fault
            raise
        if not done.get("succeeded"):
            raise LeaseLost(f"etcd: the entry of {member} is gone; join again")

    async def remove(self, member: MemberId) -> None:
        """Take away lease and entry."""
        try:
            await self._etcd.call("lease/revoke", {"ID": _lease_of(member)})
        except EtcdFault as fault:
            if not fault.is_not_found:
                raise

    async def is_there(self, member: MemberId) -> bool:
        """Whether the member has an entry."""
        there = await self._etcd.call("kv/range", {"key": _b64(self._members + member), "count_only": True})
        return int(there.get("count", 0)) == 1

    async def bury(self, member: MemberId, mark: str) -> bool:
        """Never called: etcd itself takes away whose lease is over."""
        raise CoordinationError(f"etcd ends the lease of {member} itself")

    async def claim(self, claim: Claim) -> Claim | None:
        """Write the claim if nobody has one."""
        key = self._claims + claim.session
        done = await self._if([_is_absent(key)], [_put(key, _text_of(claim))], [_get(key)])
        if done.get("succeeded"):
            return None
        return self._claim_in(claim.session, done["responses"][0]["response_range"])

    async def held(self, session: SessionId) -> Claim | None:
        """The claim on this session."""
        found = await self._etcd.call("kv/range", {"key": _b64(self._claims + session)})
        return self._claim_in(session, found) if found.get("kvs") else None

    async def replace(self, held: Claim, claim: Claim | None) -> bool:
        """Put a claim, or none, in the place of exactly this one."""
        key = self._claims + held.session
        same = {"key": _b64(key), "target": "VALUE", "result": "EQUAL", "value": _b64(_text_of(held))}
        change = {"request_delete_range": {"key": _b64(key)}} if claim is None else _put(key, _text_of(claim))
        return bool((await self._if([same], [change])).get("succeeded"))

    async def claims(self) -> list[Claim]:
        """All claims, page by page."""
        found: list[Claim] = []
        begin = self._claims
        while len(found) < SWEEP_MAX:
            page = await bounded(self.name, self._range(begin, _end_of(self._claims), limit=_PAGE))
            kvs = page.get("kvs", [])
            for kv in kvs:
                key = _text(kv["key"])
                with contextlib.suppress(CoordinationError):  # what is none cannot be swept by who does not know it
                    found.append(self._claim_in(SessionId(key.removeprefix(self._claims)), {"kvs": [kv]}))
                begin = key + "\0"
            if not page.get("more"):
                break
        return found[:SWEEP_MAX]

    async def follow(self, every_s: float) -> AsyncIterator[Change]:
        """The members, and each change of them."""
        whole = await bounded(self.name, self._range(self._members, _end_of(self._members), limit=MEMBERS_MAX + 1))
        entries: dict[MemberId, Entry] = {}
        for kv in whole.get("kvs", []):
            entries[self._member_in(kv)] = Entry(_text(kv.get("value", "")))
        yield Whole(entries)
        # Changes come through a queue so that the check goes on while nothing changes; the queue is short, and a
        # follower that is slower than etcd holds the stream up, not memory.
        heard: asyncio.Queue[Change | MidstreamError] = asyncio.Queue(maxsize=64)
        seen = _Seen(set(entries), int(whole["header"]["revision"]))
        tasks = [
            asyncio.create_task(self._watch(seen, heard), name="fleet-etcd-watch"),
            asyncio.create_task(self._check(seen, heard, every_s), name="fleet-etcd-check"),
        ]
        try:
            while True:
                change = await heard.get()
                if isinstance(change, MidstreamError):
                    raise change
                yield change
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Let go of connections."""
        await self._etcd.close()

    async def _watch(self, seen: "_Seen", heard: "asyncio.Queue[Change | MidstreamError]") -> None:
        create = {
            "key": _b64(self._members),
            "range_end": _b64(_end_of(self._members)),
            "start_revision": seen.revision + 1,
        }
        try:
            # The check hears when etcd falls silent, so a stream may be silent for ever.
            async for answer in self._etcd.stream("watch", {"create_request": create}):
                if answer.get("canceled") or int(answer.get("compact_revision", 0)):
                    why = answer.get("cancel_reason") or f"compacted up to {answer.get('compact_revision')}"
                    raise CoordinationError(f"etcd ended the watch: {why}")
                for event in answer.get("events", []):
                    await heard.put(seen.change(self._member_in(event["kv"]), event))
        except MidstreamError as error:
            await heard.put(error)
        except (KeyError, TypeError, ValueError) as error:
            await heard.put(CoordinationError(f"etcd: a watch told something that is no event ({error!r})"))

    async def _check(self, seen: "_Seen", heard: "asyncio.Queue[Change | MidstreamError]", every_s: float) -> None:
        """Ask now and then, and compare: a watch that lags behind for two checks tells of nothing any more."""
        was_behind = False
        while True:
            await asyncio.sleep(every_s)
            try:
                newest = await bounded(
                    self.name,
                    self._range(
                        self._members,
                        _end_of(self._members),
                        limit=1,
                        keys_only=True,
                        sort_target="MOD",
                        sort_order="DESCEND",
                    ),
                )
            except MidstreamError as error:
                await heard.put(error)
                return
            kvs = newest.get("kvs", [])
            newest_revision = int(kvs[0]["mod_revision"]) if kvs else 0
            is_behind = int(newest.get("count", 0)) != len(seen.members) or newest_revision > seen.revision
            if is_behind and was_behind:
                await heard.put(CoordinationError("etcd: the watch does not tell what has changed; following again"))
                return
            was_behind = is_behind
            await heard.put(Current())

    def _range(self, key: str, end: str, **options: Any) -> Any:
        return self._etcd.call("kv/range", {"key": _b64(key), "range_end": _b64(end), **options})

    async def _if(
        self,
        compare: list[dict[str, Any]],
        then: list[dict[str, Any]],
        otherwise: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        return await self._etcd.call("kv/txn", {"compare": compare, "success": then, "failure": otherwise or []})

    def _member_in(self, kv: Mapping[str, Any]) -> MemberId:
        return MemberId(_text(kv["key"]).removeprefix(self._members))

    def _claim_in(self, session: SessionId, found: Mapping[str, Any]) -> Claim:
        try:
            body = json.loads(_text(found["kvs"][0]["value"]))
            if body["v"] != 1:
                raise ValueError(f"version {body['v']}")
            owner = MemberId(body["owner"])
            lease_s_of(owner)
            return Claim(session_id(session), Generation(int(body["generation"])), owner)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CoordinationError(
                f"etcd: {self._claims}{session} is no claim that is known here ({error!r}); "
                "run the same midstream everywhere"
            ) from error


class _Seen:
    """What a watch has told so far."""

    def __init__(self, members: set[MemberId], revision: int) -> None:
        self.members = members
        self.revision = revision

    def change(self, member: MemberId, event: Mapping[str, Any]) -> Change:
        """The event as a change."""
        self.revision = max(self.revision, int(event["kv"]["mod_revision"]))
        if event.get("type") == "DELETE":
            self.members.discard(member)
            return Gone(member)
        self.members.add(member)
        return Put(member, Entry(_text(event["kv"].get("value", ""))))


def _lease_of(member: MemberId) -> str:
    """The number of a member's lease: positive and 63 bits wide. JSON has it as text."""
    return str((int(member.rpartition(".")[2], 16) & ((1 << 63) - 1)) or 1)


def _text_of(claim: Claim) -> str:
    return json.dumps({"v": 1, "generation": claim.generation, "owner": claim.owner}, sort_keys=True)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode(errors="replace")


def _end_of(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _is_absent(key: str) -> dict[str, Any]:
    return {"key": _b64(key), "target": "CREATE", "result": "EQUAL", "create_revision": "0"}


def _is_there(key: str) -> dict[str, Any]:
    return {"key": _b64(key), "target": "CREATE", "result": "GREATER", "create_revision": "0"}


def _put(key: str, value: str, lease: str = "0") -> dict[str, Any]:
    return {"request_put": {"key": _b64(key), "value": _b64(value), "lease": lease}}


def _get(key: str) -> dict[str, Any]:
    return {"request_range": {"key": _b64(key)}}
