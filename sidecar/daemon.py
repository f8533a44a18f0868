"""The daemon: the one place where sockets, processes, workers, coordinator and proxy are wired together.

Decides nothing itself. Order of a start: state folder, holder, mover, listening socket, engines; of an end: no new
sessions, running ones end (bounded), engines, mover. The holder stays where somebody still needs it (`leaving.py`).
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from ..adapters.contract import Beside, EngineAdapter, flag_value
from ..adapters.registry import adapter_for
from ..proxy.connections import BoundedSite, connections_within, raise_descriptor_limit
from ..proxy.coordinator import Reason
from ..proxy.server import build_app, make_runner
from ..session.arena import create_arena
from ..session.errors import ArenaError, LifelineError, MidstreamError
from ..session.lifeline import create_lifeline, lifeline_of
from ..session.ports import free_port, is_free
from ..session.ticket import worker_dir, write_ticket
from . import api, plugin_path
from .attach import Attached
from .cards.leaving import CardLeaving, held_meta
from .cards.watch import CardWatch
from .choice import Tier
from .config import Listen, Settings
from .control import Control, serving_control
from .coordinator import CoordinatorSettings, SidecarCoordinator
from .emptying import Emptying
from .fleet.record import Record
from .fleet_access import believer_of, is_in_a_fleet, node_name, node_url, streams_of
from .fleet_api import fleet_routes, node_record
from .fleet_listener import listen_to_the_fleet
from .fleet_member import as_member, standing_of
from .fleet_standing import Standing
from .fleet_streams import FleetStreams
from .hang import is_deaf, is_hung
from .leaving import has_claimed_places
from .lifeline_watch import LifelineWatch
from .listening import listen
from .metrics import Metrics
from .mover.client import MoverClient
from .mover.memory_map import NAME as MEMORY
from .parking.journal import Journal
from .parking.settings import limits_of
from .parking.workers import Parking
from .processes import send
from .proxy_settings import proxy_settings
from .replicas import keeper as replicas
from .replicas.keeper import ReplicasKeeper
from .replicas.remotes import peer_at
from .servants import HolderKeeper, MoverKeeper
from .served_models import ServedModels
from .state_dir import owned_state_dir, reachable_url, told_url
from .supervise import Policy, WorkerState
from .supervise_run import Command, EpochDeath, StateChange, Supervised
from .workers import Epoch, Worker, Workers, past_use

_LOG = logging.getLogger("midstream.daemon")

HANG_WATCH_S = 3.0
STATUS_EVERY_S = 1.0
# After a death: within the first its sessions have places, within the second most go on there.
_PLACED_S = 0.1
_TAKEN_UP_S = 3.0


def run(settings: Settings, command: list[str] | None) -> int:
    """Run a sidecar until SIGTERM, SIGINT or SIGHUP; `command` starts its engines, None means that others did."""
    with owned_state_dir(Path(settings.state_dir)):
        return uvloop.run(_Daemon(settings, command).run())


class _Daemon:
    def __init__(self, settings: Settings, command: Sequence[str] | None) -> None:
        self._settings = settings
        self._command = list(command) if command is not None else None
        self._state = Path(settings.state_dir)
        self._adapter: EngineAdapter | None = adapter_for(self._command) if self._command else None
        self._metrics = Metrics()
        self._workers = Workers(let_go=self._let_go)
        self._supervised: dict[str, Supervised] = {}
        self._lifelines = LifelineWatch()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._checking: set[tuple[str, int]] = set()
        self._holder = HolderKeeper(self._state / "holder.sock", on_restart=self._metrics.holder_restarts.inc)
        self._replicas = self._replicas_keeper()
        self._mover = MoverKeeper(self._mover_command(), self._state / "mover.sock", on_start=self._watch_again)
        self._mover_client = MoverClient(self._state / "mover.sock")
        self._mover_status: dict[str, Any] | None = None
        self._models = ServedModels(self._ready_engines)
        self._coordinator = SidecarCoordinator(
            self._workers,
            self._mover_client,
            self._metrics,
            CoordinatorSettings(
                takeover_timeout_s=settings.restore.takeover_timeout_s,
                load_timeout_s=settings.restore.load_timeout_s,
                tiers=frozenset(map(Tier, settings.restore.tiers.split(","))),
            ),
            suspect=self._suspect,
            stores=settings.store.dir is not None,
            memory=self._mover_client if self._keeps_in_memory else None,
            replicas=self._mover_client if self._replicas is not None else None,
            brought_over=None if self._replicas is None else self._replicas.finished,
        )

        self._emptying = Emptying(
            settings, self._workers, self._supervised, self._coordinator, self._metrics, self._holder.sizes
        )
        self._drains = self._emptying.drains
        self._parking = Parking(
            self._workers,
            self._coordinator,
            Journal(self._state),
            limits=limits_of(settings),
            drain_of=self._emptying.of,
            let_go=lambda pools, epoch: self._release(pools, epoch.arena_path),
            count=lambda order, state: self._metrics.parkings.labels(order, state).inc(),
        )

    # ---- life

    async def run(self) -> int:
        """Until told to stop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A terminal that is closed is no reason to cut streams off; under nohup it is none to stop at all.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._drains.order, number.name)
        async with AsyncExitStack() as stack:
            port = self._port()
            listener = listen(self._settings.listen.host, port)
            stack.callback(listener.close)
            stack.push_async_callback(self._leave)
            stack.callback(self._lifelines.close)
            await self._holder.ensure()
            self._clear_leftovers()
            await self._mover.ensure()
            stack.callback(self._mover.stop)
            if self._replicas is not None:
                stack.callback(self._replicas.stop)
            stack.push_async_callback(self._end_tasks)
            self._spawn(self._holder.keep(), "holder")
            self._spawn(self._mover.keep(), "mover")
            self._spawn(self._follow_status(), "status")
            if self._replicas is not None:
                self._spawn(self._replicas.keep(), "replicas")
            record_now = self._record_now(listener)
            stack.push_async_callback(self._models.close)
            standing = standing_of(self._settings)
            streams = streams_of(standing, self._settings)
            if standing is not None:
                stack.push_async_callback(standing.close)
            runner = await self._serve(listener, record_now, standing, streams)
            stack.push_async_callback(runner.cleanup)
            if streams is not None:
                await stack.enter_async_context(streams.following())
            if record_now is not None:
                await stack.enter_async_context(as_member(standing, record_now, self._settings.fleet.lease_s))
            control = Control(
                self._coordinator,
                proxy_settings(self._settings, self._adapter),
                self._drains,
                self._parking.routes(),
            )
            await stack.enter_async_context(serving_control(self._state, control))
            stack.callback(Journal(self._state).tidy)
            stack.push_async_callback(self._stop_engines)
            stack.push_async_callback(self._parking.close)
            self._start_workers()
            self._parking.begin()
            self._spawn(self._parking.keep(), "parked standbys")
            self._watch_cards(stack)
            stack.enter_context(told_url(self._state, self._told_url(listener)))
            host, bound = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _LOG.info("event=listening url=http://%s:%d state_dir=%s", shown, bound, self._state)
            stack.push_async_callback(self._drains.close)
            self._spawn(self._emptying.obey_notices(), "notices")
            # No new sessions; those that run may end or move, within the time that whoever ordered it gives them.
            await self._drains.node.over()
            _LOG.info("event=stopping sessions=%d", self._coordinator.open_count)
        return 0

    async def _stop_engines(self) -> None:
        await asyncio.gather(*(s.stop() for s in self._supervised.values()))
        # The holder stays; the pools of engines that are no more must not.
        await asyncio.gather(*self._releases)

    async def _leave(self) -> None:
        """The holder stays only where it keeps a pool, or an engine may yet bring one."""
        for worker in self._workers.all():
            for epoch in past_use(filter(None, (worker.current, *worker.older))):
                for pool in epoch.pools:
                    await asyncio.to_thread(self._holder.forget, pool)
                if epoch.arena_path is not None:
                    epoch.arena_path.unlink(missing_ok=True)
                    lifeline_of(epoch.arena_path).unlink(missing_ok=True)
        if self._keeps_in_memory:
            await asyncio.to_thread(self._holder.forget, MEMORY)
        if self._command is not None or not has_claimed_places(self._state):
            await self._holder.retire()

    async def _end_tasks(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("event=task_failed task=%s", task.get_name(), exc_info=error)

    # ---- listening

    def _port(self) -> int:
        """The configured port; if that is the default and the engine's command names one, clients expect that."""
        port = self._settings.listen.port
        asked = flag_value(self._command, "--port") if self._command else None
        if port == Listen().port and asked is not None and asked.isdigit():
            return int(asked)
        return port

    @staticmethod
    def _told_url(listener: socket.socket) -> str:
        host, bound = listener.getsockname()[:2]
        return reachable_url(host, bound)

    def _record_now(self, listener: socket.socket) -> Callable[[], Record] | None:
        """What this node says of itself to its fleet, if it is in one. ConfigError where that cannot be said."""
        fleet = self._settings.fleet
        if not is_in_a_fleet(fleet):
            return None
        return partial(
            node_record,
            self._workers,
            self._coordinator,
            self._models,
            name=node_name(fleet),
            url=node_url(fleet, self._settings.listen.host, self._told_url(listener)),
            slots=self._settings.arena.slot_count,
            replicas=self._replicas_url(listener),
        )

    def _replicas_url(self, listener: socket.socket) -> str:
        """Where this node keeps snapshots of others, if it does."""
        settings = self._settings.replicas
        if not settings.memory_bytes or not settings.listen:
            return ""
        url = node_url(self._settings.fleet, self._settings.listen.host, self._told_url(listener))
        return peer_at(settings.listen, url)

    def _ready_engines(self) -> dict[str, str]:
        ready = self._workers.ready()
        return {f"{w.name}/{w.current.number if w.current is not None else 0}": w.url for w in ready}

    async def _serve(
        self,
        listener: socket.socket,
        record_now: Callable[[], Record] | None,
        standing: Standing | None,
        streams: FleetStreams | None,
    ) -> Any:
        routes = api.routes(self._workers, self._coordinator, self._metrics, self._status)
        believer = believer_of(self._settings.fleet)
        if believer is not None and record_now is not None:
            routes += fleet_routes(believer, self._coordinator, record_now)
            routes += self._emptying.routes(believer, self._replicas)
        app = build_app(
            self._coordinator,
            proxy_settings(self._settings, self._adapter),
            routes=routes,
            elsewhere=streams,
            permits=standing,
            believer=believer,
        )
        app.on_response_prepare.append(api.counting(self._metrics))
        runner = make_runner(app)
        await runner.setup()
        connections_max = connections_within(raise_descriptor_limit())
        await BoundedSite(runner, listener, connections_max=connections_max).start()
        await listen_to_the_fleet(runner, self._settings.fleet, connections_max)
        return runner

    # ---- workers

    def _start_workers(self) -> None:
        if self._command is None:
            for configured in self._settings.workers:
                worker = self._workers.add(configured.name, configured.url)
                self._workers.became(worker, WorkerState.STARTING)
                attached = Attached(
                    worker,
                    self._workers,
                    self._state,
                    self._offer,
                    on_lost=self._epoch_lost,
                    on_state=self._on_ready,
                    on_orphan=lambda name: self._metrics.orphans_killed.labels(name).inc(),
                    lifelines=self._lifelines,
                )
                self._spawn(attached.follow(), f"worker {configured.name}")
            return
        policy = Policy(
            start_timeout_s=self._settings.supervise.start_timeout_s,
            stop_timeout_s=self._settings.supervise.stop_timeout_s,
            restart_backoff_s=self._settings.supervise.restart_backoff_s,
            restarts_max=self._settings.supervise.restarts_max,
            restarts_window_s=self._settings.supervise.restarts_window_s,
        )
        for index in range(self._settings.engine.worker_count):
            name = f"worker-{index}"
            worker = self._workers.add(name, _own_url(free_port()))
            supervised = Supervised(
                name,
                lambda epoch, worker=worker: self._prepare(worker, epoch),  # type: ignore[misc]
                policy,
                on_death=self._on_death,
                on_state=self._on_state,
                lifelines=self._lifelines,
            )
            self._supervised[name] = supervised
            supervised.start()

    async def _prepare(self, worker: Worker, number: int) -> Command:
        """An arena and the command of one epoch."""
        assert self._adapter is not None
        assert self._command is not None
        if number > 1:
            # A start keeps a processor busy for long, and the last one's sessions are just being taken up elsewhere.
            await asyncio.sleep(_PLACED_S)
            await self._coordinator.taken_up(within_s=_TAKEN_UP_S)
        if not is_free(_port_of(worker.url)):
            url = _own_url(free_port())
            _LOG.warning("event=port_taken worker=%s epoch=%d url=%s new_url=%s", worker.name, number, worker.url, url)
            worker.url = url
        epoch = self._workers.begin_epoch(worker, number, await self._make_arena(worker, number))
        launch = self._adapter.start(self._command, _port_of(worker.url), self._beside(worker, epoch), os.environ)
        lifeline = None if epoch.arena_path is None else lifeline_of(epoch.arena_path)
        return Command(launch.argv, launch.env, worker.url, lifeline)

    async def _make_arena(self, worker: Worker, number: int) -> Path | None:
        """The arena of an epoch; None, and serving without snapshots, where none can be had."""
        path = worker_dir(self._state, worker.name) / f"{number}.arena"
        path.unlink(missing_ok=True)
        sizes = self._settings.arena
        try:
            await asyncio.to_thread(create_arena, path, slot_count=sizes.slot_count, page_count=sizes.page_count)
        except (ArenaError, OSError) as error:
            self._metrics.arena_missing.inc()
            _LOG.error("event=no_arena worker=%s epoch=%d error=%s", worker.name, number, error)
            return None
        try:
            await asyncio.to_thread(create_lifeline, lifeline_of(path))
        except LifelineError as error:
            # Deaths are told a little later.
            _LOG.error("event=no_lifeline worker=%s epoch=%d error=%s", worker.name, number, error)
        return path

    def _beside(self, worker: Worker, epoch: Epoch) -> Beside:
        adopt = epoch.adopt.arena_path if epoch.adopt is not None else None
        return Beside(
            worker.name,
            epoch.number,
            self._holder.socket,
            epoch.arena_path,
            adopt,
            self._settings.restore.load_timeout_s,
            plugin_path.ensure(self._state),
        )

    async def _offer(self, worker: Worker, number: int) -> Path:
        """The next place of an engine that others start."""
        folder = worker_dir(self._state, worker.name)
        path = await self._make_arena(worker, number)
        adopt = worker.current if worker.current is not None and worker.current.pools else None
        beside = self._beside(worker, Epoch(worker.name, number, path, adopt=adopt))
        write_ticket(folder, beside.environment({}))
        return path or folder / "none"

    def _on_death(self, death: EpochDeath) -> None:
        worker = self._workers.get(death.worker)
        if worker.current is not None and worker.current.number == death.epoch:
            self._workers.became(worker, WorkerState.DEAD, death.text)
            self._epoch_lost(worker.current, Reason.PROCESS_DEATH)

    def _on_state(self, change: StateChange) -> None:
        worker = self._workers.get(change.worker)
        if change.state is WorkerState.RESTARTING:
            self._metrics.worker_restarts.labels(worker.name).inc()
            if worker.current is not None and worker.current.pools and worker.current.arena_path is not None:
                # Nothing of the engine is left: its sessions' blocks must stay as they are until they are fetched.
                self._spawn(self._seal(worker.current.arena_path), f"seal of {worker.name}")
        self._workers.became(worker, change.state, change.text, change.pid)
        if change.state is WorkerState.READY:
            self._on_ready()
        self._coordinator.workers_changed()

    def _on_ready(self) -> None:
        for worker in self._workers.ready():
            if worker.current is not None:
                self._spawn(self._welcome(worker.current), f"welcome of {worker.name}")
        self._coordinator.workers_changed()

    async def _welcome(self, epoch: Epoch) -> None:
        """A ready epoch's pools are remembered, and the mover follows its arena."""
        for pool in epoch.pools:
            await self._holder.learn(pool)
        if epoch.arena_path is not None and epoch.pools:
            try:
                await self._mover_client.watch(epoch.arena_path, epoch.worker)
            except MidstreamError as error:
                _LOG.warning("event=watch worker=%s epoch=%d error=%s", epoch.worker, epoch.number, error)

    async def _seal(self, arena: Path) -> None:
        try:
            await self._mover_client.seal(arena)
        except MidstreamError as error:
            _LOG.warning("event=seal arena=%s error=%s", arena, error)

    def _epoch_lost(self, epoch: Epoch, reason: Reason) -> None:
        self._coordinator.epoch_lost(epoch, reason)

    def _let_go(self, epoch: Epoch) -> None:
        """Nobody needs this epoch any more: its pool's memory is to be free."""
        self._releases.add(task := asyncio.create_task(self._release(epoch.pools, epoch.arena_path)))
        task.add_done_callback(self._releases.discard)
        _LOG.info("event=let_go worker=%s epoch=%d", epoch.worker, epoch.number)

    async def _release(self, pools: Sequence[str], arena: Path | None) -> None:
        for pool in pools:
            await asyncio.to_thread(self._holder.forget, pool)
        if arena is not None:
            with suppress(MidstreamError):
                await self._mover_client.release(arena)

    def _suspect(self, name: str, number: int, reason: Reason) -> None:
        """A session lost its worker though nobody reported a death: is the engine hung?"""
        worker = self._workers.get(name)
        epoch = worker.current
        if reason is not Reason.STALL or epoch is None or epoch.number != number or epoch.id in self._checking:
            return
        self._checking.add(epoch.id)
        self._spawn(self._check_hang(worker, epoch), f"hang check of {name}")

    async def _check_hang(self, worker: Worker, epoch: Epoch) -> None:
        try:
            # An engine that works may be silent for longer than a stream: its first grammar or logprobs takes half a
            # minute. What stalled has gone elsewhere already; only the restart waits for this.
            watch_s = max(HANG_WATCH_S, self._settings.proxy.stall_floor_s)
            if not (await is_hung(epoch, watch_s) or await is_deaf(worker.url, watch_s)) or epoch.dead:
                return
            _LOG.error("event=hung worker=%s epoch=%d", worker.name, epoch.number)
            self._epoch_lost(epoch, Reason.STALL)
            supervised = self._supervised.get(worker.name)
            if supervised is not None:
                # A hung engine ends by SIGKILL only, and its death is then noticed as any other.
                for process in supervised.processes():
                    send(process, signal.SIGKILL)
            else:
                self._workers.became(worker, WorkerState.DEAD, "hung: its sessions got no token, or it answers nothing")
        finally:
            self._checking.discard(epoch.id)

    # ---- cards

    def _watch_cards(self, stack: AsyncExitStack) -> None:
        """See to it that workers leave cards that fail."""
        if not self._settings.cards.poll_s:
            return
        leaving = CardLeaving(
            self._workers,
            self._coordinator,
            self._drains,
            pool_meta=partial(held_meta, self._holder.client.get),
            cards=lambda: {uuid: card.reading for uuid, card in watch.cards.items()},
            on_hung=lambda worker: self._suspect(
                worker.name, worker.current.number if worker.current is not None else 0, Reason.STALL
            ),
            moves=self._settings.cards.on_fault == "move",
        )
        watch = CardWatch(
            leaving.found,
            poll_s=self._settings.cards.poll_s,
            progress=leaving.progress,
            patience_s=max(2 * self._settings.proxy.stall_floor_s, HANG_WATCH_S),
        )
        self._metrics.cards.told = watch.told
        watch.start()
        stack.push_async_callback(leaving.close)
        stack.push_async_callback(watch.close)

    # ---- mover

    @property
    def _keeps_in_memory(self) -> bool:
        """Whether KV is copied into memory of the host."""
        return self._settings.tier1.bytes > 0 and Tier.MEMORY in self._settings.restore.tiers.split(",")

    def _mover_command(self) -> list[str]:
        store = self._settings.store
        command = [
            sys.executable, "-m", "midstream.sidecar.mover",
            "--socket", str(self._state / "mover.sock"), "--holder", str(self._state / "holder.sock"),
        ]  # fmt: skip
        if store.dir is not None:
            command += [
                "--store", store.dir, "--store-bytes-max", str(store.bytes_max),
                "--snapshot-every-s", f"{store.snapshot_every_s:g}",
                "--tail-every-tokens", str(store.tail_every_tokens),
            ]  # fmt: skip
        memory = self._settings.tier1
        if self._keeps_in_memory:
            tail = 0 if memory.tail == "never" else int(memory.tail)
            command += [
                "--memory-bytes", str(memory.bytes), "--memory-bytes-per-s", str(memory.bandwidth),
                "--memory-tail-tokens", str(tail),
            ]  # fmt: skip
        if self._replicas is not None:
            command += ["--replicas", str(self._replicas.socket)]
        return command

    def _replicas_keeper(self) -> ReplicasKeeper | None:
        if not replicas.is_wanted(self._settings.replicas):
            return None
        words = replicas.command(self._settings.replicas, self._settings.fleet, self._state, self._settings.store.dir)
        return ReplicasKeeper(words, self._state / replicas.SOCKET)

    def _watch_again(self) -> None:
        """A new mover knows nothing yet."""
        for worker in self._workers.all():
            for epoch in (worker.current, *worker.older):
                if epoch is not None and epoch.facts:
                    self._spawn(self._welcome(epoch), f"welcome of {worker.name}")

    async def _follow_status(self) -> None:
        while True:
            try:
                self._mover_status = await self._mover_client.status()
            except MidstreamError:
                self._mover_status = None
            self._metrics.set_mover(self._mover_status)
            self._metrics.drain_left.set(self._drains.left())
            if self._replicas is not None:
                self._metrics.set_replicas(await self._replicas.status())
            for name, supervised in self._supervised.items():
                self._workers.get(name).pid = supervised.pid
            await asyncio.sleep(STATUS_EVERY_S)

    def _status(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "version": version("midstream"),
            "state_dir": str(self._state),
            "draining": self._coordinator.draining,
            "drain": self._drains.told(),
            "parked": self._parking.told(),
            "cards": self._metrics.cards.told(),
            "sessions_open": self._coordinator.open_count,
            "holder": {"socket": str(self._holder.socket), "pid": self._holder.pid},
            "mover": {"pid": self._mover.pid, "restarts": self._mover.restarts, **(self._mover_status or {})},
        }

    # ---- leftovers

    def _clear_leftovers(self) -> None:
        """What a sidecar before this one left behind and nobody can use: its engines have died with it."""
        if self._command is None:
            return
        for pool in self._holder.client.list():
            self._holder.forget(pool.name)
        shutil.rmtree(self._state / "workers", ignore_errors=True)


def _own_url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _port_of(url: str) -> int:
    return int(url.rsplit(":", 1)[1])
