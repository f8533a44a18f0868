"""How traffic and memory grow with a fleet: one large world, looked at while it lives.

Owns the figures of one world: what each node asked of the coordination service, what it was told, what tables hold, and
what all of it takes of this process' memory. They say nothing of time: that is virtual.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .schedule import WARM_S, Coordinating, large
from .world import World, play

_PAGE_BYTES = 4096


@dataclass(slots=True)
class Figures:
    """Of one world. What is `each` is the mean of all nodes, and `_s` is for each virtual second."""

    nodes: int
    sessions: int
    coordinating: str
    failures: int = 0
    open_max: int = 0
    virtual_s: float = 0.0
    real_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    # Of a node's sidecar, and of a gateway: requests to the service, and events that it told.
    node_requests_each_s: float = 0.0
    node_bytes_each_s: float = 0.0
    node_events_each_s: float = 0.0
    gateway_requests_each_s: float = 0.0
    gateway_events_each_s: float = 0.0
    # Members that a process knows; entries in a gateway's tables for each of its sessions.
    roster_max: int = 0
    gateway_sessions_max: int = 0
    # Of the whole process: at rest, and with all sessions open.
    rest_mib: float = 0.0
    peak_mib: float = 0.0
    took_over: int = 0
    outcomes: dict[str, int] | None = None
    ends: dict[str, int] | None = None


def measured(seed: int, nodes: int, sessions: int, trouble: float, coordinating: Coordinating) -> Figures:
    """Play one large world. What it breaks is raised."""
    schedule = large(seed, nodes, sessions, trouble, coordinating)
    figures = Figures(nodes, sessions, coordinating, failures=len(schedule.failures))

    def looked(world: World) -> None:
        open_count = sum(g.coordinator.open_count for g in world.gateways if g.coordinator is not None and g.is_up)
        figures.open_max = max(figures.open_max, open_count)
        figures.peak_mib = max(figures.peak_mib, _resident_mib())
        figures.tokens = sum(client.tokens for client in world.clients)
        for gateway in world.gateways:
            if gateway.coordinator is not None:
                figures.gateway_sessions_max = max(figures.gateway_sessions_max, gateway.coordinator.open_count)
        if world.now_s() < WARM_S:
            figures.rest_mib = figures.peak_mib
        for _, coordination in world.shared.coordinations:
            figures.roster_max = max(figures.roster_max, len(coordination._informer._roster._tracked))

    def made(world: World) -> None:
        world.on_tick = lambda: looked(world)

    began_s = time.perf_counter()
    world = play(schedule, made)
    figures.real_s = time.perf_counter() - began_s
    figures.virtual_s, figures.steps = world.now_s(), world.loop.steps
    service = world.shared.service
    assert service is not None
    for prefix, count in (("n", nodes), ("g", len(world.gateways))):
        each_s = count * figures.virtual_s
        requests, sizes, events = (
            sum(n for name, n in counted.items() if name.startswith(prefix)) / each_s
            for counted in (service.requests, service.bytes, service.events)
        )
        if prefix == "n":
            figures.node_requests_each_s, figures.node_bytes_each_s = requests, sizes
            figures.node_events_each_s = events
        else:
            figures.gateway_requests_each_s, figures.gateway_events_each_s = requests, events
    figures.took_over = world.counts["takeovers"]
    figures.outcomes = {k.partition(" ")[2]: n for k, n in sorted(world.counts.items()) if k.startswith("outcome ")}
    figures.ends = {k.partition(" ")[2]: n for k, n in sorted(world.counts.items()) if k.startswith("client ")}
    return figures


def told(figures: Figures) -> str:
    """As one line of JSON."""
    return json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(figures).items()})


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES / (1 << 20)
