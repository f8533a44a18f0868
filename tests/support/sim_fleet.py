"""A fleet in virtual time: real members over a service and a network that do the worst that is promised of them.

Owns the truth (`World`): what the service holds, how it is reached, whose clock runs how fast, and who believes to own
which session. Requests are lost, answered late, done after their asker gave up; events come late; watches break;
processes freeze; the service is down, ends leases early, and has members deleted. `World.check` is what must hold.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from midstream.session.errors import CoordinationError, LeaseLost
from midstream.session.ids import Generation, SessionId, session_id
from midstream.sidecar.fleet.coordination import Claim, Membership, Verdict
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.lease_service import Change, Current, Entry, Gone, LeaseService, Put, Renewals, Whole
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.record import MemberId, Record, Role, lease_s_of

T = TypeVar("T")
LEASE_S = 6


class TwoOwners(AssertionError):
    """What must never be."""


@dataclass
class Held:
    """A member at the service; `ends_s` is when the service ends its lease, if it is the one who does."""

    entry: str
    version: int
    ends_s: float


@dataclass
class Counts:
    """That something happened at all."""

    won: int = 0
    taken: int = 0
    given: int = 0
    lost_leases: int = 0
    closed_fences: int = 0


class World:
    """Everything, seeded."""

    def __init__(self, seed: int, renewals: Renewals) -> None:
        self.chance = random.Random(seed)
        self.renewals = renewals
        self.is_up = True
        self.is_kind = False  # nothing is lost or late any more
        self.members: dict[MemberId, Held] = {}
        self.claims: dict[SessionId, Claim] = {}
        self.followers: list[asyncio.Queue[Change]] = []
        self.processes: list[Process] = []
        self.owners: dict[SessionId, list[MemberId]] = {}  # all that a session ever had, the latest last
        self.counts = Counts()
        self._version = 0
        self._drawn = 0

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def loses(self, share: float) -> bool:
        return not self.is_kind and self.chance.random() < share

    def delay_s(self) -> float:
        """Mostly soon; now and then so late that whoever asked has given up."""
        if self.is_kind or self.chance.random() < 0.93:
            return self.chance.uniform(0.001, 0.05)
        return self.chance.uniform(0.5, LEASE_S * 1.5)

    def draw_id(self) -> str:
        self._drawn += 1
        return f"{self._drawn:016x}"

    def version(self) -> int:
        self._version += 1
        return self._version

    def tell(self, change: Change) -> None:
        for queue in self.followers:
            queue.put_nowait(change)

    def end(self, member: MemberId) -> None:
        """Take a member away, for whatever reason."""
        if self.members.pop(member, None) is not None:
            self.tell(Gone(member))

    def expire(self) -> None:
        """What a service does that ends leases itself."""
        if self.is_up and self.renewals is Renewals.UNSEEN:
            for member in [m for m, held in self.members.items() if self.now_s() >= held.ends_s]:
                self.end(member)

    def check(self) -> None:
        """At no time two who may send own a session."""
        for session in self.owners:
            may = [p.name for p in self.processes if (one := p.owns.get(session)) is not None and one.may_send()]
            if len(may) > 1:
                raise TwoOwners(f"at {self.now_s():.3f} s {' and '.join(may)} may send for {session}")


class SimService(LeaseService):
    """The service as one process reaches it."""

    name = "simulated"

    def __init__(self, world: World, process: "Process") -> None:
        self.renewals = world.renewals
        self._world = world
        self._process = process

    async def _asked(self, done: Callable[[], T]) -> T:
        """Send a request that is done at some time, or never, whether or not anybody waits for it still."""
        world = self._world
        await self._process.awake.wait()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def arrive() -> None:
            if not world.is_up:
                return
            world.expire()
            try:
                result, fault = done(), None
            except CoordinationError as error:
                fault = error
            back_s = world.delay_s()
            if not world.loses(0.05) and self._process.is_reached:
                asyncio.get_running_loop().call_later(back_s, reply, None if fault else result, fault)

        def reply(result: T, fault: CoordinationError | None) -> None:
            if answer.done():
                return
            if fault is None:
                answer.set_result(result)
            else:
                answer.set_exception(fault)

        if not world.loses(0.05) and self._process.is_reached:
            asyncio.get_running_loop().call_later(world.delay_s(), arrive)
        try:
            return await answer
        finally:
            await self._process.awake.wait()

    async def create(self, member: MemberId, entry: str) -> float:
        def done() -> float:
            held = Held(entry, self._world.version(), self._world.now_s() + lease_s_of(member))
            self._world.members[member] = held
            self._world.tell(Put(member, Entry(entry, str(held.version))))
            return float(lease_s_of(member))

        return await self._asked(done)

    async def renew(self, member: MemberId) -> float:
        def done() -> float:
            held = self._world.members.get(member)
            if held is None:
                raise LeaseLost(f"{member} is gone")
            held.ends_s = self._world.now_s() + lease_s_of(member)
            held.version = self._world.version()
            if self.renewals is Renewals.SEEN:
                self._world.tell(Put(member, Entry(held.entry, str(held.version))))
            return float(lease_s_of(member))

        return await self._asked(done)

    async def write(self, member: MemberId, entry: str) -> None:
        def done() -> None:
            held = self._world.members.get(member)
            if held is None:
                raise LeaseLost(f"{member} is gone")
            held.entry, held.version = entry, self._world.version()
            self._world.tell(Put(member, Entry(entry, str(held.version))))

        return await self._asked(done)

    async def remove(self, member: MemberId) -> None:
        return await self._asked(lambda: self._world.end(member))

    async def is_there(self, member: MemberId) -> bool:
        return await self._asked(lambda: member in self._world.members)

    async def bury(self, member: MemberId, mark: str) -> bool:
        def done() -> bool:
            held = self._world.members.get(member)
            if held is None or str(held.version) != mark:
                return False
            self._world.end(member)
            return True

        return await self._asked(done)

    async def claim(self, claim: Claim) -> Claim | None:
        def done() -> Claim | None:
            held = self._world.claims.get(claim.session)
            if held is None:
                self._world.claims[claim.session] = claim
            return held

        return await self._asked(done)

    async def held(self, session: SessionId) -> Claim | None:
        return await self._asked(lambda: self._world.claims.get(session))

    async def replace(self, held: Claim, claim: Claim | None) -> bool:
        def done() -> bool:
            if self._world.claims.get(held.session) != held:
                return False
            if claim is None:
                del self._world.claims[held.session]
            else:
                self._world.claims[held.session] = claim
            return True

        return await self._asked(done)

    async def claims(self) -> list[Claim]:
        return await self._asked(lambda: list(self._world.claims.values()))

    async def follow(self, every_s: float) -> AsyncIterator[Change]:
        world = self._world
        queue: asyncio.Queue[Change] = asyncio.Queue()

        def whole() -> Whole:
            world.followers.append(queue)
            return Whole({m: Entry(held.entry, str(held.version)) for m, held in world.members.items()})

        try:
            yield await asyncio.wait_for(self._asked(whole), 3)
            while True:
                try:
                    change = await asyncio.wait_for(queue.get(), every_s)
                except TimeoutError:
                    change = Current()
                if not (world.is_up and self._process.is_reached) or world.loses(0.01):
                    raise CoordinationError("the watch broke off")
                await asyncio.sleep(world.delay_s() / 4)
                await self._process.awake.wait()
                yield change
        except TimeoutError:
            raise CoordinationError("no answer") from None
        finally:
            if queue in world.followers:
                world.followers.remove(queue)

    async def close(self) -> None:
        pass


@dataclass
class Process:
    """One process of the fleet, with a clock of its own."""

    world: World
    name: str
    rate: float
    offset_s: float
    is_reached: bool = True
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    owns: dict[SessionId, Membership] = field(default_factory=dict)
    membership: Membership | None = None

    def __post_init__(self) -> None:
        self.awake.set()
        self.fleet = LeasedCoordination(
            SimService(self.world, self),
            WhenAlone.STOP,
            clock=self.clock_s,
            draw=self.world.chance.random,
            draw_id=self.world.draw_id,
            sweep_every_s=30.0,
            claim_kept_s=30.0,
        )

    def clock_s(self) -> float:
        return self.offset_s + self.rate * self.world.now_s()

    async def live(self) -> None:
        """Join, take what was others', give and end sessions; join again when the lease is lost."""
        world = self.world
        former: MemberId | None = None
        while True:
            try:
                self.membership = await self.fleet.join(
                    Record(self.name, Role.NODE, "http://x", formerly=former), LEASE_S
                )
            except CoordinationError:
                await asyncio.sleep(0.5)
                continue
            lost = asyncio.ensure_future(self.membership.lost())
            while not lost.done():
                await asyncio.wait([lost], timeout=world.chance.uniform(0.05, 0.6))
                await self.awake.wait()
                try:
                    await self._act(self.membership)
                except CoordinationError:
                    continue
            world.counts.lost_leases += 1
            former = self.membership.id

    async def _act(self, membership: Membership) -> None:
        world, chance = self.world, self.world.chance
        if not world.owners or (len(world.owners) < 12 and chance.random() < 0.2):
            session = session_id(f"{chance.getrandbits(128):032x}")
            world.owners[session] = [membership.id]
            self.owns[session] = membership
            return
        session = chance.choice(sorted(world.owners))
        mine = self.owns.get(session)
        if mine is membership:
            if chance.random() < 0.1:
                await self._give(membership, session)
            return
        # What is known of its owner can be long out of date.
        known = world.owners[session]
        lost = known[-1] if chance.random() < 0.7 else chance.choice(known)
        answer = await membership.claim(session, Generation(len(known) + 1), lost)
        world.check()
        if answer.verdict is Verdict.WON:
            world.counts.won += 1
            self.owns[session] = membership
            world.owners[session].append(membership.id)
            world.check()
        elif answer.verdict is Verdict.TAKEN:
            world.counts.taken += 1

    async def _give(self, membership: Membership, session: SessionId) -> None:
        others = [p.membership for p in self.world.processes if p is not self and p.membership is not None]
        if not others:
            return
        to = self.world.chance.choice(others)
        del self.owns[session]  # nothing is sent from here on, whatever comes of it
        for _ in range(10):
            try:
                await membership.give(session, Generation(len(self.world.owners[session]) + 1), to.id)
            except LeaseLost:
                return
            except CoordinationError:
                continue
            self.world.counts.given += 1
            return


async def play(world: World, process_count: int, for_s: float) -> None:
    """Let a fleet live through all that can befall it, and check all the time; then heal it and see that it lives."""
    chance = world.chance
    for number in range(process_count):
        rate = chance.uniform(0.97, 1.03)
        world.processes.append(Process(world, f"n{number}", rate, chance.uniform(-1e6, 1e6)))
    lives = [asyncio.create_task(process.live()) for process in world.processes]
    befall = asyncio.create_task(_befall(world))
    try:
        end_s = world.now_s() + for_s
        while world.now_s() < end_s:
            await asyncio.sleep(0.02)
            world.expire()
            world.check()
            world.counts.closed_fences += sum(
                not p.membership.may_send() for p in world.processes if p.membership is not None
            )
            _raise_of(*lives, befall)
        befall.cancel()
        world.is_up = world.is_kind = True
        for process in world.processes:
            process.is_reached = True
            process.awake.set()
        for _ in range(3000):
            await asyncio.sleep(0.02)
            world.expire()
            world.check()
        for process in world.processes:
            assert process.membership is not None
            assert process.membership.may_send(), f"{process.name} is not back"
            picture = await anext(process.fleet.watch())
            assert {m.record.name for m in picture.members.values()} == {p.name for p in world.processes}
    finally:
        for task in (*lives, befall):
            task.cancel()
        await asyncio.gather(*lives, befall, return_exceptions=True)
        for process in world.processes:
            await process.fleet.close()


async def _befall(world: World) -> None:
    chance = world.chance
    while True:
        await asyncio.sleep(chance.uniform(0.2, 3.0))
        process = chance.choice(world.processes)
        match chance.randrange(6):
            case 0:
                process.is_reached = False
                _later(chance.uniform(0.5, 3 * LEASE_S), lambda p=process: setattr(p, "is_reached", True))
            case 1:
                process.awake.clear()
                _later(chance.uniform(0.5, 3 * LEASE_S), process.awake.set)
            case 2:
                world.is_up = False
                _later(chance.uniform(0.5, 2 * LEASE_S), lambda: setattr(world, "is_up", True))
            case 3 | 4 if world.members:
                # An operator, or a leader of long ago that goes on and ends leases that were renewed elsewhere.
                world.end(chance.choice(sorted(world.members)))
            case _:
                pass


def _later(after_s: float, call: Callable[[], object]) -> None:
    asyncio.get_running_loop().call_later(after_s, call)


def _raise_of(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
