"""Names of a resumed request's blocks in the prefix cache: made after it decodes again, not before.

vLLM hashes every block of a prompt when a request arrives, in a thread that shares the core's interpreter, and enters
all of them when its KV has come: a millisecond each for some thousand tokens, while each session of a dead worker waits
for all others. Nobody looks a resumed request up there, for it gets the interrupted run's KV or none. Invariant: a
request whose hashes are put off has none, and none of its blocks is entered, until `catch_up`; then it is like any
other. Where one of the functions that would miss them cannot be hooked, nothing is put off.
"""

from collections.abc import Callable
from typing import Any

from ...session.marker import FIELD, NAME, KvSource
from ..guard import log, patch

_LATE = "midstream_late_hashes"


def install() -> None:
    """Hook the making of hashes and what enters blocks by them."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
    from vllm.v1.request import Request

    known = (KVCacheCoordinator, HybridKVCacheCoordinator)
    others = [owner for owner in _kinds_of(KVCacheCoordinator) if owner not in known and _enters_by_itself(owner)]
    if others:
        log.warning("midstream: %s enters blocks by itself; prompts are hashed at once", others[0].__name__)
        return
    parameters = ("self", "request", "num_computed_tokens")
    hooked = patch(KVCacheCoordinator, "cache_blocks", parameters, _unless_late, needed=False)
    if hooked and _enters_by_itself(HybridKVCacheCoordinator):
        # In 0.25; later ones have one way for all.
        hooked = patch(HybridKVCacheCoordinator, "cache_blocks", parameters, _unless_late, needed=False)
    if hooked:
        patch(Request, "update_block_hashes", ("self",), _put_off, needed=False)


def _kinds_of(owner: type[Any]) -> list[type[Any]]:
    direct: list[type[Any]] = owner.__subclasses__()
    return [*direct, *(kind for one in direct for kind in _kinds_of(one))]


def _enters_by_itself(owner: type) -> bool:
    return "cache_blocks" in vars(owner)


def is_late(request: Any) -> bool:
    """Whether the request's blocks have no hashes yet."""
    return getattr(request, _LATE, False)


def catch_up(request: Any) -> None:
    """Make what was put off, all at once; its blocks are entered with its next step."""
    if is_late(request):
        setattr(request, _LATE, False)
        request.update_block_hashes()


class LateOnes:
    """Requests whose hashes are put off, in the order in which they came."""

    def __init__(self) -> None:
        self._requests: dict[str, Any] = {}

    def add(self, request: Any) -> None:
        """One more, if its hashes are put off at all."""
        if is_late(request):
            self._requests[request.request_id] = request

    def step(self, on_its_way: Callable[[str], bool]) -> None:
        """In each step: one catches up, unless some are still waiting for their KV, which this would hold up."""
        if self._requests and not any(map(on_its_way, self._requests)):
            catch_up(self._requests.pop(next(iter(self._requests))))


def _unless_late(original: Any) -> Any:
    def cache_blocks(self: Any, request: Any, num_computed_tokens: int) -> Any:
        return None if is_late(request) else original(self, request, num_computed_tokens)

    return cache_blocks


def _put_off(original: Any) -> Any:
    def update_block_hashes(self: Any) -> None:
        late = getattr(self, _LATE, None)
        if late is None:
            # The first time, when it is made.
            late = _brings_kv(getattr(self, "sampling_params", None))
            setattr(self, _LATE, late)
        if not late:
            original(self)

    return update_block_hashes


def _brings_kv(sampling_params: Any) -> bool:
    """Whether it may have a marker by which KV comes. What is wrong with one is found where it is read."""
    try:
        resume = sampling_params.extra_args[FIELD][NAME]["resume"]
        return bool(resume["outputs"]) and resume["kv"] != KvSource.NONE.value
    except (AttributeError, KeyError, TypeError):
        return False
