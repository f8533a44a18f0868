"""What stands in the way of parking a group, or of bringing it back: each a stable word, and a sentence with a remedy.

Pure: what is known of the machine and of the processes is given. Invariant: whatever the driver is known to lose a
process over, and that can be seen from outside, is refused here, before the process is touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from .driver import About, Gpu, ProcessState

DRIVER_MIN = 570
# Since CUDA 13.0 a process can come back on another GPU.
DRIVER_MOVE_MIN = 580
# What of the bindings is needed for that alone.
MOVE_CALLS = frozenset({"CUcheckpointRestoreArgs", "CUcheckpointGpuPair"})
HOST_SPARE_BYTES = 2 << 30
GPU_SPARE_BYTES = 256 << 20
# What a group whose ranks speak through NCCL has to be started with.
NCCL_OFF = {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


class Reason(StrEnum):
    """Why not."""

    BINDINGS = "bindings"
    DRIVER = "driver"
    GONE = "gone"
    NOT_CUDA = "not-cuda"
    STATE = "state"
    USER = "user"
    MIG = "mig"
    MPS = "mps"
    HOST_MEMORY = "host-memory"
    PEERS = "peers"
    NCCL = "nccl"
    MAP = "map"
    KIND = "kind"
    GPU_MEMORY = "gpu-memory"
    SESSIONS = "sessions"


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing in the way."""

    reason: Reason
    text: str


@dataclass(frozen=True, slots=True)
class Host:
    """The machine, as whoever asks sees it. `free_bytes`: host memory that may still be taken."""

    uid: int
    about: About
    gpus: tuple[Gpu, ...]
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A process of the group. `state`: None where the driver knows none of it. `held`: by GPU; empty if not told.

    `environ` is what it was started with, of the names in NCCL_OFF.
    """

    pid: int
    uid: int | None
    state: ProcessState | None
    held: Mapping[str, int] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)


def park_refusals(host: Host, ranks: Sequence[Rank]) -> tuple[Refusal, ...]:
    """All that stands in the way of parking these; () if nothing does."""
    found = list(_calls(host, moves=False))
    for rank in ranks:
        found += _process(host, rank, ProcessState.RUNNING)
        found += _cards(host, rank)
    # Where no process is told apart, no more can be on the GPUs than is not free there.
    size = sum(sum(rank.held.values()) for rank in ranks) or sum(g.total_bytes - g.free_bytes for g in host.gpus)
    if size + HOST_SPARE_BYTES > host.free_bytes:
        found.append(
            Refusal(
                Reason.HOST_MEMORY,
                f"the image takes {_gib(size)} of host memory and {_gib(host.free_bytes)} are free (2 GiB are spared); "
                "give it more, or make the image smaller: put the engine to sleep first",
            )
        )
    if len(ranks) > 1:
        found += _group(ranks)
    return tuple(found)


def restore_refusals(
    host: Host, ranks: Sequence[Rank], needed: Sequence[Mapping[str, int]], pairs: Mapping[str, str]
) -> tuple[Refusal, ...]:
    """All that stands in the way of bringing these back; `needed`: what each had on which GPU when it was parked."""
    moves = any(old != new for old, new in pairs.items())
    found = list(_calls(host, moves=moves))
    for rank in ranks:
        found += _process(host, rank, ProcessState.CHECKPOINTED)
    if moves and host.about.driver[:1] < (DRIVER_MOVE_MIN,):
        found.append(Refusal(Reason.DRIVER, f"driver {_version(host.about)} cannot change GPUs; 580 and newer can"))
    by_uuid = {gpu.uuid: gpu for gpu in host.gpus}
    wanted: dict[str, int] = {}
    for of_rank in needed:
        for old, size in of_rank.items():
            new = pairs.get(old, old)
            wanted[new] = wanted.get(new, 0) + size
    for uuid, size in wanted.items():
        gpu = by_uuid.get(uuid)
        if gpu is None:
            found.append(Refusal(Reason.MAP, f"there is no {uuid} on this machine; name one of `nvidia-smi -L`"))
        elif size + GPU_SPARE_BYTES > gpu.free_bytes:
            found.append(
                Refusal(
                    Reason.GPU_MEMORY,
                    f"{uuid} has {_gib(gpu.free_bytes)} free and {_gib(size)} (and 0.25) are needed; out of memory the "
                    "process would be lost, so free the GPU first, or choose another with --gpu",
                )
            )
        elif gpu.is_split:
            found.append(Refusal(Reason.MIG, f"{uuid} is in MIG mode; choose a whole GPU"))
    return tuple(found)


def full_map(gpus: Sequence[Gpu], moves: Mapping[str, str]) -> dict[str, str]:
    """Every GPU of the machine and where its memory goes, as the driver wants it; {} where nothing moves.

    A GPU that is moved to gives its own place in exchange. ValueError says why there is no such map.
    """
    moves = {old: new for old, new in moves.items() if old != new}
    if not moves:
        return {}
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    for uuid in (*moves, *moves.values()):
        if uuid not in by_uuid:
            raise ValueError(f"{Reason.MAP}: there is no {uuid} on this machine; name one of `nvidia-smi -L`")
    if len(set(moves.values())) != len(moves):
        raise ValueError(f"{Reason.MAP}: two GPUs of the process would become one; name a GPU for each")
    for old, new in moves.items():
        if (by_uuid[old].model, by_uuid[old].total_bytes) != (by_uuid[new].model, by_uuid[new].total_bytes):
            raise ValueError(
                f"{Reason.KIND}: {new} is a {by_uuid[new].model}, the process was on a {by_uuid[old].model}; "
                "choose one of the same kind"
            )
    result = {uuid: moves.get(uuid, uuid) for uuid in by_uuid}
    # Whoever lost its place to a move takes one that became free, so that the map stays one to one.
    free = [uuid for uuid in by_uuid if uuid not in result.values()]
    for uuid in by_uuid:
        if uuid not in moves and uuid in moves.values():
            result[uuid] = free.pop(0)
    return result


def _calls(host: Host, *, moves: bool) -> list[Refusal]:
    about = host.about
    if lacking := [name for name in about.missing if moves or name not in MOVE_CALLS]:
        missing = ", ".join(lacking)
        text = f"the CUDA bindings have no {missing}; install cuda-bindings 13.3.1 or newer"
        return [Refusal(Reason.BINDINGS, text)]
    if about.driver[:1] < (DRIVER_MIN,):
        text = f"driver {_version(about)} cannot checkpoint processes; 570 and newer can"
        return [Refusal(Reason.DRIVER, text)]
    return []


def _process(host: Host, rank: Rank, wanted: ProcessState) -> list[Refusal]:
    if rank.uid is None:
        return [Refusal(Reason.GONE, f"there is no process {rank.pid}; it has ended, or the pid is wrong")]
    if rank.uid != host.uid:
        text = f"process {rank.pid} is user {rank.uid}'s and this is user {host.uid}; run this as that user"
        return [Refusal(Reason.USER, text)]
    if rank.state is None:
        text = f"process {rank.pid} has no CUDA; name the process that has the model (nvidia-smi lists them)"
        return [Refusal(Reason.NOT_CUDA, text)]
    if rank.state is not wanted:
        text = f"process {rank.pid} is {rank.state.value}, not {wanted.value}; somebody else works on it, or it failed"
        return [Refusal(Reason.STATE, text)]
    return []


def _cards(host: Host, rank: Rank) -> list[Refusal]:
    found = []
    for gpu in host.gpus:
        if gpu.uuid in rank.held and gpu.is_split:
            found.append(Refusal(Reason.MIG, f"process {rank.pid} is on {gpu.uuid}, in MIG mode; use a whole one"))
        if rank.pid in gpu.served:
            found.append(Refusal(Reason.MPS, f"process {rank.pid} is served by MPS; start it without"))
    return found


def _group(ranks: Sequence[Rank]) -> list[Refusal]:
    found = []
    owners: dict[str, int] = {}
    for rank in ranks:
        # Its own GPU is the one that it has most on.
        if rank.held:
            owners[max(rank.held, key=lambda uuid: rank.held[uuid])] = rank.pid
    for rank in ranks:
        others = [uuid for uuid in rank.held if owners.get(uuid) not in (None, rank.pid)]
        if others:
            text = (
                f"process {rank.pid} has memory on {others[0]}, where process {owners[others[0]]} is: a mapping "
                "between processes does not come back; start the group without P2P and custom all-reduce"
            )
            found.append(Refusal(Reason.PEERS, text))
        wrong = [f"{name}={value}" for name, value in NCCL_OFF.items() if rank.environ.get(name) != value]
        if wrong:
            text = f"process {rank.pid} was not started with {' '.join(wrong)}; NCCL's own memory does not come back"
            found.append(Refusal(Reason.NCCL, text))
    return found


def _version(about: About) -> str:
    return ".".join(map(str, about.driver)) or "(unknown)"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
