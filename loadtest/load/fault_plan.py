"""Which faults a run is to suffer, and when. Pure but for reading a plan's file.

Owns the words of a plan. Invariant: a seed draws the same plan, and every strategy of a run gets the same one. Times
are the earliest ones: a fault waits for its turn until workers are ready and streams are being written (`strike.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

from ...session.errors import ConfigError

FAULTS_MAX = 1000
FOR_S_MAX = 3600.0


class Kind(StrEnum):
    """What can be done to a worker."""

    KILL_CORE = "kill-core"
    KILL_WORKER = "kill-worker"
    KILL_TREE = "kill-tree"
    STOP = "stop"
    TERM = "term"
    NET_CUT = "net-cut"
    NET_SLOW = "net-slow"


KILLS = (Kind.KILL_CORE, Kind.KILL_WORKER, Kind.KILL_TREE)
# After these the worker is started again: the next fault waits for its next epoch.
ENDS_EPOCH = (*KILLS, Kind.TERM)
NETWORK = (Kind.NET_CUT, Kind.NET_SLOW)
LASTS = (Kind.STOP, *NETWORK)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, not before `at_s`. `worker` None takes one that writes streams."""

    number: int
    at_s: float
    kind: Kind
    worker: str | None = None
    for_s: float = 5.0
    delay_s: float = 0.0
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ArenaSize:
    """An arena so small that it is full: what does not fit has no journal."""

    slot_count: int
    page_count: int


@dataclass(frozen=True, slots=True)
class Plan:
    """All faults of a pass, in order."""

    faults: tuple[Fault, ...] = ()
    arena: ArenaSize | None = None

    @property
    def needs_relay(self) -> bool:
        """Whether the network between sidecar and workers is to be touched."""
        return any(fault.kind in NETWORK for fault in self.faults)


def draw_kills(count: int, every_s: float, seed: int) -> Plan:
    """So many SIGKILLs: cores, workers and trees in turn, `every_s` apart in the mean, and at least half of it."""
    if not 0 <= count <= FAULTS_MAX:
        raise ConfigError(f"--kills: {count} is out of range; 0 to {FAULTS_MAX}")
    chance = Random(f"{seed}/faults")
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += chance.sample(KILLS, len(KILLS))
    at_s, faults = 0.0, []
    for number, kind in enumerate(kinds[:count], 1):
        at_s += every_s * (0.5 + chance.random())
        faults.append(Fault(number, round(at_s, 3), kind))
    return Plan(tuple(faults))


def read_plan(path: Path) -> Plan:
    """The plan of a YAML file; ConfigError names the entry that is wrong."""
    import yaml

    try:
        told = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); name a fault plan in YAML") from error
    if not isinstance(told, dict) or not set(told) <= {"faults", "arena"}:
        raise ConfigError(f'{path}: expected "faults" (a list) and, if wanted, "arena" (slot_count, page_count)')
    listed = told.get("faults")
    listed = [] if listed is None else listed
    if not isinstance(listed, list) or len(listed) > FAULTS_MAX:
        raise ConfigError(f'{path}: "faults" must be a list of at most {FAULTS_MAX}')
    found = [_fault(entry, f"{path}: fault {number}") for number, entry in enumerate(listed, 1)]
    return Plan(_in_order(found), _arena(told.get("arena"), f"{path}: arena"))


def _in_order(found: Sequence[Fault]) -> tuple[Fault, ...]:
    from dataclasses import replace

    ordered = sorted(found, key=lambda fault: fault.at_s)
    return tuple(replace(fault, number=number) for number, fault in enumerate(ordered, 1))


def _fault(entry: Any, place: str) -> Fault:
    if not isinstance(entry, dict):
        raise ConfigError(f'{place}: expected an object such as {{"at_s": 5, "kind": "kill-tree"}}')
    unknown = set(entry) - {"at_s", "kind", "worker", "for_s", "delay_s", "bytes_per_s"}
    if unknown:
        raise ConfigError(f"{place}: {', '.join(sorted(map(str, unknown)))} is unknown; see docs/loadtest.md")
    try:
        kind = Kind(str(entry.get("kind")))
    except ValueError as error:
        raise ConfigError(f"{place}: kind {entry.get('kind')!r} is unknown; known are {', '.join(Kind)}") from error
    worker = entry.get("worker")
    if worker is not None and not isinstance(worker, str):
        raise ConfigError(f'{place}: worker must be a name such as "worker-0"')
    fault = Fault(
        number=0,
        at_s=_number(entry, "at_s", place, 0.0, 1e6, required=True),
        kind=kind,
        worker=worker,
        for_s=_number(entry, "for_s", place, 0.0, FOR_S_MAX, default=5.0),
        delay_s=_number(entry, "delay_s", place, 0.0, 60.0),
        bytes_per_s=_number(entry, "bytes_per_s", place, 0.0, 1e12),
    )
    if kind is Kind.NET_SLOW and not (fault.delay_s or fault.bytes_per_s):
        raise ConfigError(f"{place}: {kind} needs delay_s or bytes_per_s")
    if kind not in LASTS and "for_s" in entry:
        raise ConfigError(f"{place}: {kind} does not last; leave for_s out")
    return fault


def _number(
    entry: dict[str, Any],
    name: str,
    place: str,
    least: float,
    most: float,
    *,
    default: float = 0.0,
    required: bool = False,
) -> float:
    value = entry.get(name)
    if value is None and not required:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ConfigError(f"{place}: {name} is {value!r}; expected a number from {least:g} to {most:g}")
    return float(value)


def _arena(told: Any, place: str) -> ArenaSize | None:
    if told is None:
        return None
    if not isinstance(told, dict) or not set(told) <= {"slot_count", "page_count"}:
        raise ConfigError(f"{place}: expected slot_count and page_count")
    # The bounds are those of the settings that they become.
    slots = _number(told, "slot_count", place, 1, 65_536, default=256)
    pages = _number(told, "page_count", place, 16, 1_048_576, default=16_384)
    return ArenaSize(int(slots), int(pages))
