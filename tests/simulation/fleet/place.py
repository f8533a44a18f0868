"""What all simulated processes share, and a process's connection to the coordination service.

Owns the settings of one world. Times of leases are counted on each process's own clock, which may run a little fast or
slow.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from midstream.proxy.settings import ProxySettings
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.metrics import Metrics

from .loop import Process, SimLoop
from .network import Network
from .service import Leases, Service
from .stores import SnapshotStore
from .truth import Question

SWEEP_EVERY_S = 30.0


class Models:
    """What every engine serves here."""

    def names(self) -> tuple[str, ...]:
        return ("sim",)


@dataclass(slots=True)
class Shared:
    """One world's."""

    loop: SimLoop
    network: Network
    service: Service | None
    chance: random.Random
    proxy: ProxySettings
    metrics: Metrics
    questions: dict[str, Question]
    on_defect: Callable[[BaseException], None]
    lease_s: int
    takeover_timeout_s: float
    bytes_per_s: int
    keeps_others: bool
    look_s: float
    # Nodes' memories for others' snapshots, by where they are reached.
    peers: dict[str, SnapshotStore] = field(default_factory=dict)
    when_alone: WhenAlone = WhenAlone.STOP
    secret: bytes = b"s" * 32
    models: Models = field(default_factory=Models)
    processes: list[Process] = field(default_factory=list)
    coordinations: list[tuple[Process, LeasedCoordination]] = field(default_factory=list)

    def process(self, name: str) -> Process:
        """A new one."""
        made = Process(self.loop, name)
        self.network.born(made)
        self.processes.append(made)
        return made

    def wall_s(self) -> float:
        """The time of day, as most clocks have it."""
        return 1.7e9 + self.loop.now_s


def coordination_of(
    shared: Shared, process: Process, host: str, clock_rate: float = 1.0, clock_offset_s: float = 0.0
) -> LeasedCoordination | None:
    """One process's connection to the coordination service, if there is one."""
    if shared.service is None:
        return None
    chance = shared.chance
    made = LeasedCoordination(
        Leases(shared.service, process, host),
        shared.when_alone,
        clock=lambda: clock_offset_s + clock_rate * shared.loop.now_s,
        draw=chance.random,
        draw_id=lambda: f"{chance.getrandbits(64):016x}",
        sweep_every_s=SWEEP_EVERY_S,
    )
    shared.coordinations.append((process, made))
    return made
