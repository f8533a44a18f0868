"""The ranks of an engine: how many there are, which of them this worker is, and what it has done of each step.

Owns the commits of this worker (session/commits.py). Invariant: a step is committed only after all KV that this rank
writes in it: on a CPU when the forward pass has returned, on a GPU by the GPU itself, behind the forward pass on its
stream. Engines of one rank commit nothing: their tokens come from where their KV is written.
"""

from typing import Any

from ...session.arena import ArenaMap
from ...session.commit_writer import CommitWriter, Store
from ...session.errors import ArenaError
from ..guard import log
from ..plugin_settings import PluginSettings


def rank_count(vllm_config: Any) -> int:
    """How many workers an engine has, each with a pool of its own."""
    parallel = vllm_config.parallel_config
    return int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)


def rank_of_worker() -> int:
    """The number of this worker among all of its engine: those that share a layer count on from each other."""
    from vllm.distributed import get_pp_group, get_tp_group

    tensor_parallel = get_tp_group()
    return int(get_pp_group().rank_in_group) * int(tensor_parallel.world_size) + int(tensor_parallel.rank_in_group)


class Commits:
    """The commits of this worker. Raises MidstreamError where it is a rank and can make none."""

    def __init__(self, settings: PluginSettings, vllm_config: Any) -> None:
        self._writer = _writer(settings, vllm_config) if rank_count(vllm_config) > 1 else None

    @property
    def are_made(self) -> bool:
        """Whether this worker is a rank that can say what it has done."""
        return self._writer is not None and not self._writer.stopped

    def done(self, step: int, *, failed: bool) -> None:
        """The forward pass of a step has returned, or was launched on a GPU."""
        if self._writer is None or self._writer.stopped:
            return
        if failed:
            self._writer.stop()
        elif self._writer.commit(step):
            return
        log.warning("midstream: this rank failed in step %d or missed one; its sessions have no KV any more", step)


def _writer(settings: PluginSettings, vllm_config: Any) -> CommitWriter:
    if settings.arena is None:
        raise ArenaError("no arena is named in the environment; start this engine beside a sidecar")
    match vllm_config.device_config.device_type:
        case "cpu":
            return CommitWriter(settings.arena, rank_of_worker())
        case "cuda":
            writer = CommitWriter(settings.arena, rank_of_worker(), _behind_the_stream)
            _require_stores(writer)
            return writer
        case other:
            raise ArenaError(f"a rank on {other} cannot say what it has done; use a CPU or a GPU of NVIDIA's")


def _behind_the_stream(arena: ArenaMap) -> Store:
    """Stores that the GPU makes when it has done what was launched before them."""
    import torch

    from ...session.vram import register_host, store_on_stream

    device = torch.cuda.current_device()
    begin = register_host(arena.address, arena.header_bytes, device)

    def store(offset: int, cell: int) -> None:
        store_on_stream(torch.cuda.current_stream(device).cuda_stream, begin + offset, cell, device)

    return store


def _require_stores(writer: CommitWriter) -> None:
    """Raise ArenaError unless what the GPU stores is there when the stream is done."""
    import torch

    for number in (1 << 63 | 1, 1 << 62 | 2):
        writer.store_probe(number)
        torch.cuda.current_stream().synchronize()
        if writer.read_probe() != number:
            raise ArenaError("what this GPU stores does not arrive in the arena; its driver may be too old")


def step_of(scheduler_output: Any) -> int | None:
    """The number of a step, from what the scheduler gave to the workers with it."""
    step = getattr(getattr(scheduler_output, "kv_connector_metadata", None), "step", None)
    return step if isinstance(step, int) and step else None
