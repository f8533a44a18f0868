"""What is to happen in one world: its shape, its clients, its failures. Pure: one seed is one schedule.

Owns the drawing. A schedule is data, so a failing one can be told, replayed, and played again without some of its
failures (`shrink.py`). Times are seconds since the world began.
"""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from .truth import Question

WARM_S = 3.0


class Kind(StrEnum):
    """What may befall a world."""

    NODE_KILL = "node-kill"
    NODE_POWER = "node-power"
    NODE_PAUSE = "node-pause"
    MACHINE_PAUSE = "machine-pause"
    NODE_DRAIN = "node-drain"  # to its end, or until it is cancelled
    WORKER_KILL = "worker-kill"
    WORKER_HANG = "worker-hang"
    CUT = "cut"
    CUT_ONE_WAY = "cut-one-way"
    SLOW_LINK = "slow-link"
    SERVICE_DOWN = "service-down"
    SERVICE_SLOW = "service-slow"
    SERVICE_LOSSY = "service-lossy"
    SERVICE_LATE = "service-late"
    SERVICE_COMPACTED = "service-compacted"
    LEASE_ENDED = "lease-ended"  # by a service that lies, or whoever may
    DISK_LOST = "disk-lost"
    STORE_LOST = "store-lost"
    GATEWAY_KILL = "gateway-kill"
    GATEWAY_PAUSE = "gateway-pause"
    WALL_CLOCK = "wall-clock"


# How often each comes, beside the others.
_WEIGHTS = {
    Kind.NODE_KILL: 6, Kind.NODE_POWER: 3, Kind.NODE_PAUSE: 4, Kind.MACHINE_PAUSE: 2, Kind.NODE_DRAIN: 5,
    Kind.WORKER_KILL: 8, Kind.WORKER_HANG: 2, Kind.CUT: 5, Kind.CUT_ONE_WAY: 5, Kind.SLOW_LINK: 3,
    Kind.SERVICE_DOWN: 2, Kind.SERVICE_SLOW: 2, Kind.SERVICE_LOSSY: 2, Kind.SERVICE_LATE: 2,
    Kind.SERVICE_COMPACTED: 2, Kind.LEASE_ENDED: 3, Kind.DISK_LOST: 1, Kind.STORE_LOST: 1, Kind.GATEWAY_KILL: 1,
    Kind.GATEWAY_PAUSE: 1, Kind.WALL_CLOCK: 1,
}  # fmt: skip
_OF_THE_SERVICE = frozenset(
    {
        Kind.SERVICE_DOWN, Kind.SERVICE_SLOW, Kind.SERVICE_LOSSY, Kind.SERVICE_LATE, Kind.SERVICE_COMPACTED,
        Kind.LEASE_ENDED,
    }
)  # fmt: skip


class Coordinating(StrEnum):
    """Where nodes are known from."""

    NONE = "none"
    ETCD = "etcd"  # the service alone sees renewals, and ends leases
    KUBERNETES = "kubernetes"  # all who follow see them


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that befalls the world at `at_s`, for `for_s` where it lasts."""

    at_s: float
    kind: Kind
    one: int
    other: int = 0
    for_s: float = 0.0
    much: float = 0.0

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} s  {self.kind:18} {self.one}/{self.other} for {self.for_s:.2f} s, {self.much:.2f}"


@dataclass(frozen=True, slots=True)
class Asked:
    """One client's request; `leaves_at` a token, or to its end; `reads_s` is how long it takes for each write."""

    at_s: float
    question: Question
    leaves_at: int | None = None
    reads_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What a world is made of."""

    nodes: int
    gateways: int
    coordinating: Coordinating
    lease_s: int
    stores: int
    horizon_s: float
    fault_rate: float = 0.0
    takeover_timeout_s: float = 20.0
    step_s: float = 0.1
    slots: int = 16
    workers: int = 1
    bytes_per_s: int = 20_000_000
    has_disks: bool = True
    keeps_others: bool = True
    moves_recompute: bool = False
    odd_keys: float = 0.0
    chunk: int = 2
    last_lost: float = 0.05
    # How often what must hold is looked at, and how often movers look at what is new.
    tick_s: float = 0.25
    look_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Schedule:
    """One world's story."""

    seed: int
    shape: Shape
    asked: tuple[Asked, ...]
    failures: tuple[Failure, ...]

    def without(self, indices: "set[int]") -> "Schedule":
        """The same, but for some failures."""
        kept = tuple(f for n, f in enumerate(self.failures) if n not in indices)
        return replace(self, failures=kept)

    def lines(self) -> list[str]:
        """The story for people."""
        return [f"seed {self.seed}: {self.shape}", *map(str, self.failures)]


def small(seed: int) -> Schedule:
    """A few nodes, some dozens of sessions, and more trouble than any fleet has in a year."""
    chance = random.Random(f"{seed}/shape")
    nodes = chance.choice((1, 2, 2, 3, 4, 5, 6, 8, 12, 20))
    shape = Shape(
        nodes=nodes,
        gateways=chance.choice((1, 1, 2)),
        coordinating=chance.choice(list(Coordinating)),
        lease_s=chance.choice((3, 4, 6)),
        stores=chance.choice((0, 1, 1, 2)),
        horizon_s=chance.uniform(10.0, 18.0),
        fault_rate=chance.choice((0.0, 0.0, 0.05, 0.2)),
        step_s=chance.choice((0.08, 0.15)),
        slots=chance.choice((4, 8, 16)),
        workers=chance.choice((1, 1, 2)),
        bytes_per_s=chance.choice((500_000, 5_000_000, 50_000_000)),
        has_disks=chance.random() < 0.8,
        keeps_others=chance.random() < 0.7,
        moves_recompute=chance.random() < 0.5,
        odd_keys=chance.choice((0.0, 0.0, 0.3)),
        chunk=chance.choice((1, 2, 3)),
        last_lost=chance.choice((0.0, 0.1, 0.1, 0.9)),
    )
    sessions = chance.randint(14, 32)
    return Schedule(
        seed,
        shape,
        tuple(_asked(chance, number, shape) for number in range(sessions)),
        failures(chance, shape, count=chance.randint(6, 24)),
    )


def large(seed: int, nodes: int, sessions: int, trouble: float, coordinating: Coordinating) -> Schedule:
    """A fleet with so many sessions, nearly all of them at once, and `trouble` failures for each node."""
    chance = random.Random(f"{seed}/large")
    shape = Shape(
        nodes=nodes,
        gateways=max(1, min(4, nodes // 20)),
        coordinating=coordinating,
        lease_s=10,
        stores=1,
        horizon_s=40.0,
        takeover_timeout_s=60.0,
        step_s=2.0,
        slots=max(16, 3 * sessions // (2 * nodes)),
        bytes_per_s=20_000_000,
        chunk=4,
        tick_s=1.0,
        look_s=3.0,
    )
    asked = []
    for number in range(sessions):
        length = chance.randint(24, 40)
        question = Question(number, length, "length", chance.choice((40, 400)), wants_ids=chance.random() < 0.5)
        asked.append(Asked(WARM_S + chance.uniform(2.0, 14.0), question))
    # The clients of a gateway that is killed have nothing more to tell.
    befall = failures(chance, shape, count=round(trouble * nodes), never=frozenset({Kind.GATEWAY_KILL}))
    return Schedule(seed, shape, tuple(asked), befall)


def _asked(chance: random.Random, number: int, shape: Shape) -> Asked:
    length = chance.choice((chance.randint(1, 4), chance.randint(10, 60), chance.randint(40, 120)))
    question = Question(
        number=number,
        length=length,
        finish=chance.choice(("stop", "length")),
        prompt_len=chance.choice((3, 40, 400)),
        is_streamed=chance.random() < 0.85,
        policy="exact" if chance.random() < 0.15 else "best-effort",
        wants_ids=chance.random() < 0.5,
    )
    leaves_at = chance.randint(1, length) if question.is_streamed and chance.random() < 0.07 else None
    reads_s = 0.3 if chance.random() < 0.05 else 0.0
    return Asked(WARM_S + chance.uniform(0.0, shape.horizon_s * 0.7), question, leaves_at, reads_s)


def failures(
    chance: random.Random, shape: Shape, *, count: int, never: frozenset[Kind] = frozenset()
) -> tuple[Failure, ...]:
    """So many failures, spread over the world's time."""
    kinds = [
        kind
        for kind in Kind
        if not (kind in _OF_THE_SERVICE and shape.coordinating is Coordinating.NONE)
        and not (kind is Kind.STORE_LOST and not shape.stores)
        and kind not in never
    ]
    weights = [_WEIGHTS[kind] for kind in kinds]
    found = []
    for _ in range(count):
        kind = chance.choices(kinds, weights)[0]
        long = chance.random() < 0.3
        found.append(
            Failure(
                at_s=WARM_S + chance.uniform(0.3, shape.horizon_s),
                kind=kind,
                one=chance.randrange(1 << 16),
                other=chance.randrange(1 << 16),
                for_s=chance.uniform(3.0, 3.0 * shape.lease_s) if long else chance.uniform(0.05, 3.0),
                much=chance.random(),
            )
        )
    return tuple(sorted(found, key=lambda failure: failure.at_s))
