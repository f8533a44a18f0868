"""A fleet in the Kubernetes API: a Lease object for each member, and one for each claim.

Owns what these objects say. A member's is `<fleet>.member.<member>`, renewed by replacing it; its record is an
annotation, and `renewTime` is for people, for nobody here reads a wall clock. A claim's is `<fleet>.claim.<session>`.
The API ends no leases: whoever follows sees all renewals, counts a lease from the last one it saw, and buries who was
silent for so long by deleting exactly the version that it saw. After that no renewal finds the object any more.

Invariant: every write names the version (resourceVersion) or the identity (uid) of what it replaces or deletes.
"""

import asyncio
import contextlib
import datetime
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...session.errors import CoordinationError, LeaseLost, MidstreamError
from ...session.ids import Generation, SessionId, session_id
from .clock import Clock, boot_clock_s
from .coordination import MEMBERS_MAX, Claim
from .kubernetes_access import KubernetesAccess
from .kubernetes_api import KubernetesFault, LeaseApi
from .lease_service import SWEEP_MAX, Change, Current, Entry, Gone, LeaseService, Put, Renewals, Whole, bounded
from .record import MemberId, lease_s_of, member_name

_DOMAIN = "midstream.dev"
_RECORD = f"{_DOMAIN}/record"
_PAGE = 500
# A watch is begun anew from where it was so often; a connection that died silently is found out by that at the latest.
_WATCH_S = 120
# Of those who write the same object at the same time one succeeds each round.
_ROUNDS_MAX = 4


@dataclass(slots=True)
class _Own:
    """The object of a member of this process as it was written last."""

    entry: str
    uid: str
    version: str


class KubernetesService(LeaseService):
    """One fleet in one namespace."""

    name = "kubernetes"
    renewals = Renewals.SEEN

    def __init__(self, access: KubernetesAccess, fleet: str, clock: Clock = boot_clock_s) -> None:
        self._api = LeaseApi(access)
        self._fleet = member_name(fleet)
        self._clock = clock
        self._own: dict[MemberId, _Own] = {}
        self._changed_s = -math.inf  # when the watch told of a change last

    async def create(self, member: MemberId, entry: str) -> float:
        """An object for a new member."""
        made = await self._api.create(self._member_body(member, entry))
        self._own[member] = _Own(entry, *_identity(made))
        return float(lease_s_of(member))

    async def renew(self, member: MemberId) -> float:
        """Replace the object by itself."""
        await self._replace_own(member, self._own_of(member).entry)
        return float(lease_s_of(member))

    async def write(self, member: MemberId, entry: str) -> None:
        """Replace the object, which renews it, too."""
        await self._replace_own(member, entry)

    async def remove(self, member: MemberId) -> None:
        """Delete the object."""
        own = self._own.pop(member, None)
        if own is not None:
            try:
                await self._api.delete(self._member_object(member), uid=own.uid)
            except KubernetesFault as fault:
                if not (fault.is_gone or fault.is_conflict):
                    raise

    async def is_there(self, member: MemberId) -> bool:
        """Whether the member has an object."""
        try:
            await self._api.get(self._member_object(member))
        except KubernetesFault as fault:
            if fault.is_gone:
                return False
            raise
        return True

    async def bury(self, member: MemberId, mark: str) -> bool:
        """Delete the object as it was when it was seen last."""
        uid, _, version = mark.partition(" ")
        try:
            await self._api.delete(self._member_object(member), uid=uid, version=version)
        except KubernetesFault as fault:
            if fault.is_gone or fault.is_conflict:
                # Who deleted it may have done so after a renewal that was not seen here yet.
                return False
            raise
        return True

    async def claim(self, claim: Claim) -> Claim | None:
        """Create the claim's object if there is none."""
        for _ in range(_ROUNDS_MAX):
            try:
                await self._api.create(self._claim_body(claim))
            except KubernetesFault as fault:
                if not fault.is_conflict:
                    raise
            else:
                return None
            if (held := await self.held(claim.session)) is not None:
                return held
        raise CoordinationError(f"Kubernetes API: the claim of session {claim.session} comes and goes; ask again")

    async def held(self, session: SessionId) -> Claim | None:
        """The claim on this session."""
        found = await self._claim_object(session)
        return None if found is None else self._claim_in(found)

    async def replace(self, held: Claim, claim: Claim | None) -> bool:
        """Replace or delete the claim's object if it is exactly this one."""
        found = await self._claim_object(held.session)
        if found is None or self._claim_in(found) != held:
            return False
        uid, version = _identity(found)
        name = found["metadata"]["name"]
        try:
            if claim is None:
                await self._api.delete(name, uid=uid, version=version)
            else:
                await self._api.update(name, self._claim_body(claim, uid, version))
        except KubernetesFault as fault:
            if fault.is_gone or fault.is_conflict:
                return False
            raise
        return True

    async def claims(self) -> list[Claim]:
        """All claims, page by page."""
        found = await self._listed("claim", SWEEP_MAX)
        claims = []
        for one in found.objects:
            with contextlib.suppress(CoordinationError):  # what is none cannot be swept by who does not know it
                claims.append(self._claim_in(one))
        return claims

    async def follow(self, every_s: float) -> AsyncIterator[Change]:
        """The members, and each change of them."""
        listed = await self._listed("member", MEMBERS_MAX + 1)
        entries = {}
        for one in listed.objects:
            put = self._put(one)
            entries[put.member] = put.entry
        yield Whole(entries)
        # Short: a follower that is slower than the API holds the stream up, not memory.
        heard: asyncio.Queue[Change | MidstreamError] = asyncio.Queue(maxsize=64)
        self._changed_s = self._clock()
        tasks = [
            asyncio.create_task(self._watch(listed.version, heard), name="fleet-kubernetes-watch"),
            asyncio.create_task(self._check(heard, every_s), name="fleet-kubernetes-check"),
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
        await self._api.close()

    async def _watch(self, version: str, heard: "asyncio.Queue[Change | MidstreamError]") -> None:
        try:
            while True:
                began_s = self._clock()
                async for kind, found in self._api.watch(self._selector("member"), version, _WATCH_S):
                    version = found["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        self._changed_s = self._clock()
                    if kind in ("ADDED", "MODIFIED"):
                        await heard.put(self._put(found))
                    elif kind == "DELETED":
                        await heard.put(Gone(self._member_in(found)))
                # It is the server who ends watches, after a time; one that ends them at once is not to be asked on.
                await asyncio.sleep(max(0.0, began_s + 1.0 - self._clock()))
        except MidstreamError as error:
            await heard.put(error)
        except (KeyError, TypeError) as error:
            await heard.put(
                CoordinationError(f"Kubernetes API: a watch told of something that is no Lease ({error!r})")
            )

    async def _check(self, heard: "asyncio.Queue[Change | MidstreamError]", every_s: float) -> None:
        """Ask now and then whether the API answers, where no change says so: in a fleet renewals come all the time."""
        while True:
            await asyncio.sleep(every_s)
            if self._clock() >= self._changed_s + every_s:
                try:
                    await bounded(self.name, self._api.list(self._selector("member"), limit=1))
                except MidstreamError as error:
                    await heard.put(error)
                    return
            await heard.put(Current())

    async def _replace_own(self, member: MemberId, entry: str) -> None:
        name = self._member_object(member)
        own = self._own_of(member)
        for _ in range(_ROUNDS_MAX):
            try:
                made = await self._api.update(name, self._member_body(member, entry, own.uid, own.version))
            except KubernetesFault as fault:
                if fault.is_gone:
                    raise self._lost(member, "gone") from fault
                if not fault.is_conflict:
                    raise
            else:
                own.entry, (own.uid, own.version) = entry, _identity(made)
                return
            # An answer was lost, or somebody else has changed the object: it is ours as long as it is the same one.
            try:
                uid, version = _identity(await self._api.get(name))
            except KubernetesFault as fault:
                if fault.is_gone:
                    raise self._lost(member, "gone") from fault
                raise
            if uid != own.uid:
                raise self._lost(member, "another object by now")
            own.version = version
        raise CoordinationError(f"Kubernetes API: {name} is changed by somebody else all the time; who writes it?")

    def _lost(self, member: MemberId, what: str) -> LeaseLost:
        self._own.pop(member, None)
        return LeaseLost(f"Kubernetes: {self._member_object(member)} is {what}; join again")

    def _own_of(self, member: MemberId) -> _Own:
        own = self._own.get(member)
        if own is None:
            raise LeaseLost(f"Kubernetes: {member} has no object of this process; join again")
        return own

    async def _listed(self, kind: str, count_max: int) -> "_Listed":
        objects: list[dict[str, Any]] = []
        then = ""
        while True:
            page = await bounded(self.name, self._api.list(self._selector(kind), _PAGE, then))
            objects += page.get("items") or []
            about = page.get("metadata") or {}
            then = str(about.get("continue") or "")
            if not then or len(objects) >= count_max:
                return _Listed(objects[:count_max], str(about.get("resourceVersion", "")))

    async def _claim_object(self, session: SessionId) -> dict[str, Any] | None:
        try:
            return await self._api.get(f"{self._fleet}.claim.{session}")
        except KubernetesFault as fault:
            if fault.is_gone:
                return None
            raise

    def _put(self, found: Mapping[str, Any]) -> Put:
        member = self._member_in(found)
        text = str((found["metadata"].get("annotations") or {}).get(_RECORD, ""))
        return Put(member, Entry(text, " ".join(_identity(found))))

    def _selector(self, kind: str) -> str:
        return f"{_DOMAIN}/fleet={self._fleet},{_DOMAIN}/kind={kind}"

    def _member_object(self, member: MemberId) -> str:
        return f"{self._fleet}.member.{member}"

    def _member_in(self, found: Mapping[str, Any]) -> MemberId:
        return MemberId(str(found["metadata"]["name"]).removeprefix(f"{self._fleet}.member."))

    def _claim_in(self, found: Mapping[str, Any]) -> Claim:
        name = str(found["metadata"]["name"])
        try:
            spec = found["spec"]
            owner = MemberId(spec["holderIdentity"])
            lease_s_of(owner)
            session = session_id(name.removeprefix(f"{self._fleet}.claim."))
            return Claim(session, Generation(int(spec["leaseTransitions"])), owner)
        except (KeyError, TypeError, ValueError) as error:
            raise CoordinationError(
                f"Kubernetes API: {name} is no claim that is known here ({error!r}); run the same midstream everywhere"
            ) from error

    def _member_body(self, member: MemberId, entry: str, uid: str = "", version: str = "") -> dict[str, Any]:
        spec = {"holderIdentity": member, "leaseDurationSeconds": lease_s_of(member), "renewTime": _wall_time()}
        return self._body("member", self._member_object(member), spec, uid, version, {_RECORD: entry})

    def _claim_body(self, claim: Claim, uid: str = "", version: str = "") -> dict[str, Any]:
        spec = {"holderIdentity": claim.owner, "leaseTransitions": claim.generation, "acquireTime": _wall_time()}
        return self._body("claim", f"{self._fleet}.claim.{claim.session}", spec, uid, version, {})

    def _body(
        self, kind: str, name: str, spec: Mapping[str, Any], uid: str, version: str, annotations: Mapping[str, str]
    ) -> dict[str, Any]:
        labels = {f"{_DOMAIN}/fleet": self._fleet, f"{_DOMAIN}/kind": kind}
        about: dict[str, Any] = {"name": name, "labels": labels}
        if annotations:
            about["annotations"] = dict(annotations)
        if uid:
            about |= {"uid": uid, "resourceVersion": version}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": about, "spec": dict(spec)}


@dataclass(frozen=True, slots=True)
class _Listed:
    objects: list[dict[str, Any]]
    version: str


def _identity(found: Mapping[str, Any]) -> tuple[str, str]:
    try:
        about = found["metadata"]
        return str(about["uid"]), str(about["resourceVersion"])
    except (KeyError, TypeError) as error:
        raise CoordinationError(
            "Kubernetes API: answered something that is no object; is this an API server?"
        ) from error


def _wall_time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
