"""A simulated coordination service, and what each process asks of it: down, slow, compacted, late, and lying.

Owns members, claims and watches as etcd or Kubernetes would keep them (`Renewals` says which). Invariants: a request is
done once or not at all, whether or not its answer comes; each watch is told every change in order, or breaks. What it
may do: answer late, after its asker gave up; tell changes late; end a lease that was renewed (`end`), as a leader that
was voted out or anybody with rights may; break watches (`compact`). It counts what it is asked, by process.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

from midstream.session.errors import CoordinationError, LeaseLost
from midstream.session.ids import SessionId
from midstream.sidecar.fleet.coordination import Claim
from midstream.sidecar.fleet.lease_service import Change, Current, Entry, Gone, LeaseService, Put, Renewals, Whole
from midstream.sidecar.fleet.record import MemberId, lease_s_of

from .loop import WORLD, Process
from .network import Network

T = TypeVar("T")

HOST = "service"
# A watch that is so far behind is ended: the real ones compact.
BEHIND_MAX = 20_000
_EXPIRE_S = 0.25


@dataclass(slots=True)
class _Held:
    entry: str
    version: int
    ends_s: float


class Service:
    """The service itself."""

    def __init__(self, network: Network, chance: random.Random, renewals: Renewals) -> None:
        self.network = network
        self.renewals = renewals
        self.is_up = True
        self.slow_s = 0.0
        self.late_s = 0.0
        self.loss = 0.0
        self.members: dict[MemberId, _Held] = {}
        self.claims: dict[SessionId, Claim] = {}
        self.requests: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._chance = chance
        self._watches: list[asyncio.Queue[tuple[float, Change] | None]] = []
        self._version = 0
        self._expire_later()

    def version(self) -> int:
        self._version += 1
        return self._version

    def tell(self, change: Change) -> None:
        """Every watch is told, sooner or later."""
        at_s = self.network.loop.now_s + self.late_s * self._chance.random()
        for watch in list(self._watches):
            if watch.qsize() >= BEHIND_MAX:
                self._watches.remove(watch)
                watch.put_nowait(None)
            else:
                watch.put_nowait((at_s, change))

    def end(self, member: MemberId) -> None:
        """Take a member away, rightly or not."""
        if self.members.pop(member, None) is not None:
            self.tell(Gone(member))

    def compact(self) -> None:
        """All watches break: what they had not been told is only in the whole."""
        for watch in self._watches:
            watch.put_nowait(None)
        self._watches.clear()

    def watch(self) -> "asyncio.Queue[tuple[float, Change] | None]":
        queue: asyncio.Queue[tuple[float, Change] | None] = asyncio.Queue()
        self._watches.append(queue)
        return queue

    def unwatch(self, queue: "asyncio.Queue[tuple[float, Change] | None]") -> None:
        if queue in self._watches:
            self._watches.remove(queue)

    def loses(self) -> bool:
        return self.loss > 0 and self._chance.random() < self.loss

    def delay_s(self) -> float:
        return self.slow_s * self._chance.random() + 0.002 * self._chance.random()

    def expire(self) -> None:
        """What a service does that ends leases itself."""
        if self.is_up and self.renewals is Renewals.UNSEEN:
            now_s = self.network.loop.now_s
            for member in [m for m, held in self.members.items() if now_s >= held.ends_s]:
                self.end(member)

    def _expire_later(self) -> None:
        self.network.loop.call_later(_EXPIRE_S, self._expired, context=WORLD)

    def _expired(self) -> None:
        self.expire()
        self._expire_later()


class Leases(LeaseService):
    """The service as one process reaches it."""

    name = "simulated"

    def __init__(self, service: Service, process: Process, host: str) -> None:
        self.renewals = service.renewals
        self._service = service
        self._process = process
        self._host = host

    async def create(self, member: MemberId, entry: str) -> float:
        service = self._service

        def done() -> float:
            if member in service.members:
                raise CoordinationError(f"{member} is there already")
            lease_s = float(lease_s_of(member))
            held = _Held(entry, service.version(), service.network.loop.now_s + lease_s)
            service.members[member] = held
            service.tell(Put(member, Entry(entry, str(held.version))))
            return lease_s

        return await self._asked(done, len(entry))

    async def renew(self, member: MemberId) -> float:
        service = self._service

        def done() -> float:
            held = self._held(member)
            held.ends_s = service.network.loop.now_s + lease_s_of(member)
            if service.renewals is Renewals.SEEN:
                held.version = service.version()
                service.tell(Put(member, Entry(held.entry, str(held.version))))
            return float(lease_s_of(member))

        return await self._asked(done, len(member))

    async def write(self, member: MemberId, entry: str) -> None:
        service = self._service

        def done() -> None:
            held = self._held(member)
            held.entry, held.version = entry, service.version()
            service.tell(Put(member, Entry(entry, str(held.version))))

        await self._asked(done, len(entry))

    async def remove(self, member: MemberId) -> None:
        await self._asked(lambda: self._service.end(member))

    async def is_there(self, member: MemberId) -> bool:
        return await self._asked(lambda: member in self._service.members)

    async def bury(self, member: MemberId, mark: str) -> bool:
        service = self._service

        def done() -> bool:
            held = service.members.get(member)
            if held is None or str(held.version) != mark:
                return False
            service.end(member)
            return True

        return await self._asked(done)

    async def claim(self, claim: Claim) -> Claim | None:
        claims = self._service.claims

        def done() -> Claim | None:
            held = claims.get(claim.session)
            if held is None:
                claims[claim.session] = claim
            return held

        return await self._asked(done)

    async def held(self, session: SessionId) -> Claim | None:
        return await self._asked(lambda: self._service.claims.get(session))

    async def replace(self, held: Claim, claim: Claim | None) -> bool:
        claims = self._service.claims

        def done() -> bool:
            if claims.get(held.session) != held:
                return False
            if claim is None:
                del claims[held.session]
            else:
                claims[held.session] = claim
            return True

        return await self._asked(done)

    async def claims(self) -> list[Claim]:
        return await self._asked(lambda: list(self._service.claims.values()))

    async def follow(self, every_s: float) -> AsyncIterator[Change]:
        service = self._service
        queue: asyncio.Queue[tuple[float, Change] | None] | None = None

        def whole() -> Whole:
            nonlocal queue
            queue = service.watch()
            return Whole({m: Entry(held.entry, str(held.version)) for m, held in service.members.items()})

        try:
            first = await asyncio.wait_for(self._asked(whole), 3)
            self._heard(len(first.entries))
            yield first
            assert queue is not None
            while True:
                try:
                    # Most changes come in crowds: who has one waiting needs no clock for it.
                    told = await asyncio.wait_for(queue.get(), every_s) if queue.empty() else queue.get_nowait()
                except TimeoutError:
                    # Nothing came: does it still answer, and was everything told?
                    await asyncio.wait_for(self._asked(lambda: None), 3)
                    if queue.empty():
                        yield Current()
                    continue
                if told is None:
                    raise CoordinationError("what was to follow is compacted")
                at_s, change = told
                while service.network.is_cut(HOST, self._host):  # noqa: ASYNC110 - a link tells nobody
                    await asyncio.sleep(0.1)
                if at_s > service.network.loop.now_s:
                    await asyncio.sleep(at_s - service.network.loop.now_s)
                self._heard(1)
                yield change
        except TimeoutError:
            raise CoordinationError("no answer") from None
        finally:
            if queue is not None:
                service.unwatch(queue)

    async def close(self) -> None:
        pass

    def _held(self, member: MemberId) -> _Held:
        held = self._service.members.get(member)
        if held is None:
            raise LeaseLost(f"{member} is gone")
        return held

    def _heard(self, count: int) -> None:
        self._service.events[self._process.name] += count

    async def _asked(self, done: Callable[[], T], size_bytes: int = 0) -> T:
        """Send a request that is done at some time, or never, whether or not anybody waits for it still."""
        service, network = self._service, self._service.network
        loop = network.loop
        service.requests[self._process.name] += 1
        service.bytes[self._process.name] += size_bytes
        answer: asyncio.Future[T] = loop.create_future()

        def arrive() -> None:
            if not service.is_up or network.is_cut(self._host, HOST) or service.loses():
                return
            service.expire()
            result: T | None = None
            fault: CoordinationError | None = None
            try:
                result = done()
            except CoordinationError as error:
                fault = error
            back_s = service.delay_s() + network.latency_s(HOST, self._host)
            loop.call_later(back_s, reply, result, fault, context=WORLD)

        def reply(result: T, fault: CoordinationError | None) -> None:
            if answer.done() or network.is_cut(HOST, self._host) or service.loses():
                return
            if fault is None:
                answer.set_result(result)
            else:
                answer.set_exception(fault)

        if self._process.is_alive:
            loop.call_later(service.delay_s() + network.latency_s(self._host, HOST), arrive, context=WORLD)
        return await answer
