"""What must hold in every world, at any time and at its end.

Owns the words for what is broken; each check raises `Broken`. They look into the product's own tables on purpose: that
they are bounded and agree with each other is a promise like the others.
"""

from typing import TYPE_CHECKING

from midstream.session.ids import SessionId

from .client import Broken, End, SimClient

if TYPE_CHECKING:
    from .gateway import SimGateway
    from .node import SimNode
    from .world import World

# After so long without failures every request has ended.
SETTLES_WITHIN_S = 180.0
# After that, everything that it needed has been let go of.
ENDS_WITHIN_S = 12.0
# Of one process: those that follow something, and some that end by themselves.
TASKS_MAX = 16
_ANNOUNCED = frozenset({"recomputed", "restarted", "refused"})


def of_a_client(client: SimClient) -> None:
    """Whatever it was called, it is no more than that."""
    outcome = client.report.outcome if client.report is not None else None
    is_heard = client.gateway is not None and client.gateway.is_alive
    if client.end is End.WHOLE and outcome is None and is_heard:
        raise client.broken("no-report", "nobody said what happened to it")
    if client.differs_at is None:
        return
    if client.question.policy == "exact":
        raise client.broken("not-exact", f"its policy is exact, and output {client.differs_at} is another")
    if client.end is End.WHOLE and outcome not in _ANNOUNCED and is_heard:
        raise client.broken("not-exact", f"it was called {outcome}, and output {client.differs_at} is another")


def at_any_time(world: "World") -> None:
    """Between two things that happen."""
    _one_may_send(world)
    for gateway in world.gateways:
        if gateway.is_up:
            _gateway_is_sound(gateway)
    for node in world.nodes:
        if node.is_up:
            _node_is_sound(node)


def _one_may_send(world: "World") -> None:
    """Nobody holds a member for over whose fence is open: its sessions could have two owners that send."""
    opened = {
        membership.id: process
        for process, coordination in world.shared.coordinations
        if process.is_alive and not process.is_stopped
        for membership in coordination._members
        if membership.may_send()
    }
    for process, coordination in world.shared.coordinations:
        if not process.is_alive:
            continue
        roster, now_s = coordination._informer._roster, coordination._clock()
        wrong = [member for member in opened if member in roster._over and opened[member] is not process]
        wrong += [
            member
            for member, tracked in roster._tracked.items()
            if (tracked.has_gone or tracked.has_left) and member in opened and roster.is_over(now_s, member)
        ]
        for member in wrong:
            raise Broken("two-owners", f"{process.name} holds {member} for over, whose fence is open")


def _gateway_is_sound(gateway: "SimGateway") -> None:
    coordinator = gateway.coordinator
    assert coordinator is not None
    sessions = coordinator._sessions
    if not coordinator._asking.keys() <= sessions.keys():
        raise Broken("tables", f"{gateway.name} asks after sessions that are over")
    counted = {node.id: node.open for node in coordinator.nodes.all()}
    owned: dict[str, int] = {}
    for session in sessions.values():
        owned[session.stay.node] = owned.get(session.stay.node, 0) + 1
    for node, count in counted.items():
        if count < 0 or (count != owned.get(node, 0)):
            raise Broken("tables", f"{gateway.name} counts {count} sessions at {node}, and has {owned.get(node, 0)}")
    for session in sessions.values():
        generations = [stay.generation for stay in session.stays]
        if generations != sorted(set(generations)):
            raise Broken("generation", f"session {session.facts.session} had the owners {generations}")


def _node_is_sound(node: "SimNode") -> None:
    coordinator = node.coordinator
    assert coordinator is not None
    for record in coordinator._records.values():
        if record.owner.generation > record.facts.generation_max:
            raise Broken("generation", f"{node.name}: {record.owner} is beyond {record.facts.generation_max}")
        if record.source.generation > record.owner.generation:
            raise Broken("generation", f"{node.name}: {record.source} is newer than {record.owner}")
        for place in (record.owner, record.source):
            if record.facts.session not in place.epoch.sessions:
                raise Broken("tables", f"{node.name}: {place} was given away")

    running: dict[str, int] = {}
    for engine in node.engines():
        for run in engine.runs:
            if not run.is_left:
                running[run.marker.session] = running.get(run.marker.session, 0) + 1
    for session, count in running.items():
        record = coordinator._records.get(SessionId(session))
        if count > 1 and (record is None or record.fetched is None):
            raise Broken("two-runs", f"{node.name} computes session {session} {count} times")


def at_the_end(world: "World") -> None:
    """Every request has ended and nothing befalls anybody: what is left was leaked."""
    for client in world.clients:
        if client.end is End.REFUSED and client.code not in ("not_exact", "poison_request"):
            raise client.broken("refused", f"{client.code} after {client.tries} tries, in peace")
    for gateway in world.gateways:
        coordinator = gateway.coordinator
        assert coordinator is not None
        assert gateway.process is not None
        if coordinator._sessions or coordinator._asking:
            raise Broken("leak", f"{gateway.name} still has {len(coordinator._sessions)} sessions")
        _few_tasks(gateway.name, [str(task) for task in gateway.process.tasks], TASKS_MAX + len(world.nodes))
    for node in world.nodes:
        assert node.coordinator is not None
        assert node.sessions is not None
        assert node.process is not None
        if node.coordinator._records or node.sessions._guests:
            left = len(node.coordinator._records), len(node.sessions._guests)
            raise Broken("leak", f"{node.name} still has {left[0]} sessions of {left[1]} guests")
        for worker in node.workers.all():
            if worker.older or (worker.current is not None and worker.current.sessions):
                raise Broken("leak", f"{node.name}/{worker.name} still keeps {worker.older}")
        _few_tasks(node.name, [str(task) for task in node.process.tasks], TASKS_MAX)
        for engine in node.engines():
            if engine.runs:
                raise Broken("leak", f"{node.name} still computes {len(engine.runs)} requests")


def nothing_is_left(world: "World") -> None:
    """All processes were killed: each of their tasks has ended."""
    for process in world.shared.processes:
        if process.tasks and not process.is_alive:
            raise Broken("leak", f"{process.name} has tasks that do not end: {list(process.tasks)[:3]}")


def _few_tasks(name: str, tasks: list[str], count_max: int) -> None:
    if len(tasks) > count_max:
        raise Broken("leak", f"{name} has {len(tasks)} tasks: {tasks[: count_max + 4]}")
