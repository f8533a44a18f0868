"""A simulated sidecar: the real coordinator, workers, tracker and choice; simulated engines, mover and clients.

Everything that happens comes from one seed. `World.run` raises what was broken; `World.told` says what happened.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.proxy.coordinator import Outcome, Placement, Reason, SessionFacts
from midstream.session.arena import create_arena
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.sidecar.choice import Tier
from midstream.sidecar.coordinator import CoordinatorSettings, SidecarCoordinator
from midstream.sidecar.metrics import Metrics
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Epoch, Worker, Workers

from .sim_engine import INDEX, LOST, Ask, Run, Said, SimEngine, SimPool, undisturbed
from .sim_mover import SimMover

STALL_S = 1.2
TAKEOVERS_MAX = 12
TAKEOVER_TIMEOUT_S = 20.0
RESTARTS_MAX = 25


@dataclass(slots=True)
class Client:
    """One client: what it asked for and what it got."""

    ask: Ask
    unary: bool
    logprobs: bool
    leaves_at: int | None
    got: list[int] = field(default_factory=list)
    finish: str = ""
    refusals: int = 0
    endings: list[str] = field(default_factory=list)
    outcome: Outcome | None = None
    generations: list[int] = field(default_factory=list)

    def facts(self) -> SessionFacts:
        body: dict[str, object] = {"max_tokens": self.ask.length if self.ask.finish == "length" else 1000}
        if self.logprobs:
            body["logprobs"] = 1
        return SessionFacts(self.ask.session, "/v1/completions", body, not self.unary)


@dataclass(slots=True)
class Machine:
    """One worker's process, whichever epoch it is in."""

    worker: Worker
    plugin: bool
    key: dict[str, str]
    engine: SimEngine | None = None
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    serving: "asyncio.Task[None] | None" = None


class World:
    """One schedule."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng = rng = random.Random(seed)
        self._folder = folder
        self.pools: dict[str, SimPool] = {}
        self._arenas: dict[Path, str] = {}
        self.told: Counter[str] = Counter()
        self._gone_on: dict[SessionId, set[int]] = {}
        self.broken: list[BaseException] = []
        keeping = random.Random(~seed)
        keeps = keeping.random() < 0.5
        fault_rate = rng.choice([0.0, 0.0, 0.1, 0.4])
        self.mover = SimMover(rng, self._pool_of, fault_rate, keeping if keeps else None)
        self._stores = rng.random() < 0.4
        tiers = rng.choice([set(Tier), set(Tier), {Tier.HELD}, {Tier.IN_PLACE}, {Tier.DISK}, {Tier.NONE}])
        if keeps and tiers == {Tier.NONE}:
            tiers = {Tier.MEMORY}
        self.workers = Workers(let_go=self._let_go)
        self.coordinator = SidecarCoordinator(
            self.workers,
            self.mover,
            Metrics(),
            CoordinatorSettings(TAKEOVER_TIMEOUT_S, load_timeout_s=0.5, tiers=frozenset(tiers)),
            stores=self._stores,
            memory=self.mover if keeps else None,
        )
        self._machines = [self._machine(index) for index in range(rng.randint(1, 3))]
        self._clients = [self._client(index) for index in range(rng.randint(2, 7))]
        self._violence = rng.choice([0.5, 1.5, 4.0])

    # ---- what there is

    def _machine(self, index: int) -> Machine:
        key = {name: name for name in REQUIRED}
        plugin = True
        match self.rng.random() if index else 1.0:
            case chance if chance < 0.1:
                plugin = False
            case chance if chance < 0.2:
                key["dtype"] = "another"
        return Machine(self.workers.add(f"w{index}", f"http://w{index}"), plugin, key)

    def _client(self, index: int) -> Client:
        rng = self.rng
        prompt = (1000 + index, *(rng.randrange(5000, 6000) for _ in range(rng.randint(1, 9))))
        length = rng.choice([rng.randint(1, 3), rng.randint(4, 40), rng.randint(30, 90)])
        ask = Ask(SessionId(f"{index:032x}"), prompt, length, rng.choice(["stop", "length"]))
        leaves_at = rng.randint(1, length) if rng.random() < 0.1 else None
        return Client(ask, unary=rng.random() < 0.2, logprobs=rng.random() < 0.2, leaves_at=leaves_at)

    def _pool_of(self, arena: Path) -> SimPool | None:
        return self.pools.get(self._arenas.get(arena, ""))

    def _let_go(self, epoch: Epoch) -> None:
        self.told["let_go"] += 1
        for name in epoch.pools:
            del self.pools[name]
        if epoch.arena_path is not None:
            self.mover.release(epoch.arena_path)

    # ---- one schedule

    async def run(self) -> None:
        """Until every session has ended and everything was let go."""
        lives = [asyncio.create_task(self._live(machine)) for machine in self._machines]
        others = [asyncio.create_task(work) for work in (self._watch(), self._harm())]
        sessions = [asyncio.create_task(self._session(client)) for client in self._clients]
        await asyncio.wait(sessions)
        for task in others:
            task.cancel()
        for session in sessions:
            session.result()
        for error in await asyncio.gather(*others, return_exceptions=True):
            if error is not None and not isinstance(error, asyncio.CancelledError):
                raise error
        await self._settle(lives)
        self._judge()

    async def _settle(self, lives: list["asyncio.Task[None]"]) -> None:
        """Nobody needs anything any more: of the epochs that died, nothing is left."""
        while any(m.worker.state not in (WorkerState.READY, WorkerState.FAILED) for m in self._machines):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for machine in self._machines:
            older = [epoch.number for epoch in machine.worker.older]
            assert not older, f"{machine.worker.name} still keeps the epochs {older}"
            if machine.worker.state is WorkerState.FAILED:
                assert machine.worker.current is None, "a worker that stays away keeps its last epoch"
        for life in lives:
            life.cancel()
        await asyncio.gather(*lives, return_exceptions=True)
        await self.mover.close()
        for machine in self._machines:
            self._kill(machine)
            self.workers.became(machine.worker, WorkerState.STOPPED)
        assert not self.pools, f"still held: {sorted(self.pools)}"
        assert not list(self._folder.iterdir()), "arenas were left behind"
        assert self.coordinator.open_count == 0
        for error in self.broken:
            raise error

    async def _live(self, machine: Machine) -> None:
        """One worker from start to start."""
        worker, rng = machine.worker, self.rng
        for number in range(1, RESTARTS_MAX + 1):
            arena = self._folder / f"{worker.name}-{number}.arena" if machine.plugin else None
            if arena is not None:
                create_arena(arena, slot_count=16, page_count=64)
            epoch = self.workers.begin_epoch(worker, number, arena)
            machine.killed.clear()
            self._became(worker, WorkerState.STARTING)
            if await self._dies_within(machine, rng.uniform(0.02, 0.4)):
                self._became(worker, WorkerState.DEAD)
                continue
            machine.engine = engine = self._start(machine, epoch)
            if not await self._dies_within(machine, rng.uniform(0.0, 0.2)):
                machine.serving = asyncio.create_task(self._serve(engine))
                self._became(worker, WorkerState.READY)
                await machine.killed.wait()
            # What the kernel tells, and what the connections tell, in either order.
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.05, 1.5]))
            self._became(worker, WorkerState.DEAD)
            self.coordinator.epoch_lost(epoch, Reason.PROCESS_DEATH)
            self._became(worker, WorkerState.RESTARTING)
        self._became(worker, WorkerState.FAILED)

    def _start(self, machine: Machine, epoch: Epoch) -> SimEngine:
        adopt = epoch.adopt
        name = f"{epoch.worker}/{epoch.number}/0"
        adopted = adopt is not None and self.rng.random() < 0.8
        old = self.pools[adopt.pools[0]] if adopted and adopt is not None else None
        pool = old if old is not None else SimPool.make(name, self.rng.choice([80, 200]))
        adopt_path = adopt.arena_path if adopted and adopt is not None else None
        engine = SimEngine(self.rng, epoch.arena_path, pool, adopt_path)
        if epoch.arena_path is not None:
            self.pools[name] = pool
            self._arenas[epoch.arena_path] = name
        facts = {"engine": "transformers", "key": machine.key, "pools": [name], "adopted": adopted, "max_sessions": 4}
        engine.publish(facts)
        return engine

    async def _serve(self, engine: SimEngine) -> None:
        try:
            await engine.serve()
        except Exception as error:
            self.broken.append(error)

    async def _dies_within(self, machine: Machine, within_s: float) -> bool:
        if self.rng.random() < 0.1:
            machine.killed.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(machine.killed.wait(), within_s)
        if machine.killed.is_set():
            self._kill(machine)
        return machine.killed.is_set()

    def _became(self, worker: Worker, state: WorkerState) -> None:
        self.workers.became(worker, state)
        self.coordinator.workers_changed()

    def _kill(self, machine: Machine) -> None:
        engine = machine.engine
        machine.killed.set()
        if engine is None or not engine.alive:
            return
        self.told["kills"] += 1
        if machine.serving is not None:
            machine.serving.cancel()
        if self.rng.random() < 0.7:
            engine.drop_connections()
        engine.kill()

    async def _watch(self) -> None:
        """The mover follows the arenas; sometimes it is restarted and knows nothing."""
        while True:
            await asyncio.sleep(self.rng.uniform(0.02, 0.1))
            self._owners_are_sound()
            if self.rng.random() < 0.02:
                self.mover.forget_sums()
            for machine in self._machines:
                current = machine.worker.current
                if current is not None and current.arena_path is not None and current.pools:
                    self.mover.observe(current.arena_path, store=self._stores)

    def _owners_are_sound(self) -> None:
        """Each session has one owner, of the newest generation, and both its places are kept for it."""
        for record in self.coordinator._records.values():
            assert record.owner.generation == record.tracker.generation
            assert record.source.generation <= record.owner.generation
            for place in (record.owner, record.source):
                assert record.facts.session in place.epoch.sessions, f"{place} was given away"
                assert place.epoch.arena_path is None or place.epoch.arena_path.exists(), f"{place} was let go"

    async def _harm(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(self._violence))
            machine = self.rng.choice(self._machines)
            engine = machine.engine
            if engine is None or not engine.alive:
                continue
            match self.rng.random():
                case chance if chance < 0.7:
                    self._kill(machine)
                case chance if chance < 0.85:
                    self.told["stalls"] += 1
                    engine.paused.clear()
                    asyncio.get_running_loop().call_later(self.rng.uniform(0.1, 3.0), engine.paused.set)
                case _:
                    self.told["cut connections"] += 1
                    engine.drop_connections()

    # ---- a proxy's part

    async def _session(self, client: Client) -> None:
        await asyncio.sleep(self.rng.uniform(0, 2.0))
        facts = client.facts()
        while True:
            try:
                placement = await self.coordinator.admit(facts)
                break
            except Refused as error:
                await asyncio.sleep(error.retry_after_s or 0.0)
                if all(m.worker.state is WorkerState.FAILED for m in self._machines):
                    client.refusals += 1
                    return
        await self._stream(client, facts, placement)

    async def _stream(self, client: Client, facts: SessionFacts, placement: Placement) -> None:
        ending = "failed"
        for _ in range(TAKEOVERS_MAX):
            client.generations.append(placement.marker.generation)
            reason = await self._attempt(client, facts, placement)
            if reason is None:
                ending = "cancelled" if client.leaves_at is not None and not client.finish else "finished"
                break
            if reason is Reason.MISMATCH:
                self.coordinator.mismatched(facts, placement, "other tokens")
            try:
                placement = await self.coordinator.take_over(facts, placement, reason, tuple(client.got))
            except Refused:
                client.refusals += 1
                break
        else:
            client.refusals += 1
        client.outcome = self.coordinator.outcome(facts)
        self.coordinator.ended(facts, ending)
        client.endings.append(ending)
        self.told[ending] += 1
        self.told[f"outcome {client.outcome}"] += 1

    async def _attempt(self, client: Client, facts: SessionFacts, placement: Placement) -> Reason | None:
        """One worker's stream, spliced as the proxy does it; None when the session is over."""
        expected = placement.expected
        assert expected[: len(client.got)] == tuple(client.got), "what the client has is not a prefix"
        if placement.finish is not None and not client.unary and expected == tuple(client.got):
            self._resumed(facts, placement)
            client.finish = placement.finish
            return None
        machine = next(m for m in self._machines if m.worker.name == placement.worker)
        if machine.engine is None or not machine.engine.alive:
            await asyncio.sleep(0.001)
            return Reason.UNREACHABLE
        run = machine.engine.submit(client.ask, placement.marker)
        try:
            return await self._read(client, facts, placement, run)
        finally:
            run.aborted = True

    async def _read(self, client: Client, facts: SessionFacts, placement: Placement, run: Run) -> Reason | None:
        seen: list[int] = []
        while True:
            said = await self._next(placement, run, client.unary)
            if isinstance(said, Reason):
                return said
            for token in said.tokens:
                at = len(seen)
                known = placement.expected if len(placement.expected) > len(client.got) else client.got
                if at < len(known) and token != known[at]:
                    return Reason.MISMATCH
                seen.append(token)
                if client.unary or at < len(client.got):
                    continue
                client.got.append(token)
                self._resumed(facts, placement)
                if client.leaves_at == len(client.got):
                    return None
            if said.finish:
                if len(seen) < len(placement.expected):
                    return Reason.MISMATCH
                if client.unary:
                    client.got = seen
                self._resumed(facts, placement)
                client.finish = said.finish
                return None

    def _resumed(self, facts: SessionFacts, placement: Placement) -> None:
        """Something new was sent: said once for each takeover."""
        generation, said = placement.marker.generation, self._gone_on.setdefault(facts.session, {1})
        if generation not in said:
            said.add(generation)
            self.coordinator.resumed(facts, placement, 0.1)

    async def _next(self, placement: Placement, run: Run, unary: bool) -> Said | Reason:
        getting = asyncio.ensure_future(run.stream.get())
        patience_s = 30.0 if unary else STALL_S
        try:
            either: set[asyncio.Future[Any]] = {getting, placement.interrupted}
            await asyncio.wait(either, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                said = getting.result()
                return Reason.EOF if said is LOST else said
            return placement.interrupted.result() if placement.interrupted.done() else Reason.STALL
        finally:
            getting.cancel()

    # ---- what must be true

    def _judge(self) -> None:
        told = {line["session"]: line for line in self.coordinator.sessions()}
        for client in self._clients:
            who = f"session {client.ask.session[-2:]} {client}"
            got = client.got
            assert [token // INDEX for token in got] == list(range(len(got))), f"lost or repeated: {who}"
            assert client.generations == list(range(1, len(client.generations) + 1)), who
            if not client.generations:
                assert client.refusals == 1, who
                continue
            assert len(client.endings) == 1, who
            state = told[client.ask.session]["state"]
            assert client.refusals == (client.endings == ["failed"]), who
            match client.endings[0]:
                case "finished":
                    assert (len(got), client.finish) == (client.ask.length, client.ask.finish), who
                    assert state == "finished", who
                case "cancelled":
                    assert state == "cancelled", who
                case _:
                    assert state in ("refused", "failed"), who
            if client.outcome in (None, Outcome.EXACT):
                assert got == undisturbed(client.ask)[: len(got)], f"called {client.outcome}: {who}"
            assert len(told[client.ask.session]["outcomes"]) == len(client.generations) - (
                client.endings != ["failed"]
            ) or client.endings == ["failed"], who
