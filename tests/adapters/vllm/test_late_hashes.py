"""Hashes of a resumed request's blocks come after it decodes again, and until then nobody misses them."""

import gc
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm import late_hashes
from midstream.session.marker import FIELD, NAME, KvSource

BLOCK = 4


class Request:
    """As vLLM's: it hashes what is full when it is made, and after each token."""

    def __init__(self, request_id: str, tokens: int, extra_args: Any = None) -> None:
        self.request_id = request_id
        self.sampling_params = SimpleNamespace(extra_args=extra_args)
        self.tokens = tokens
        self.block_hashes: list[int] = []
        self.update_block_hashes()

    def append(self) -> None:
        """One more token."""
        self.tokens += 1
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Whatever is full and has none yet."""
        self.block_hashes += range(len(self.block_hashes), self.tokens // BLOCK)


class KVCacheCoordinator:
    """Enters blocks by their hashes, as vLLM's: all of those that are full have to be there."""

    def __init__(self) -> None:
        self.entered: dict[str, int] = {}

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Enter those that are full."""
        assert len(request.block_hashes) >= num_computed_tokens // BLOCK
        self.entered[request.request_id] = num_computed_tokens // BLOCK


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """One with a way of its own, as in vLLM 0.25."""

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Enter those that are full."""
        super().cache_blocks(request, num_computed_tokens)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of these parts; what is hooked is given back."""
    coordinators, requests = ModuleType("kv_cache_coordinator"), ModuleType("request")
    vars(coordinators).update(KVCacheCoordinator=KVCacheCoordinator, HybridKVCacheCoordinator=HybridKVCacheCoordinator)
    vars(requests).update(Request=Request)
    for name, module in (("core.kv_cache_coordinator", coordinators), ("request", requests)):
        monkeypatch.setitem(sys.modules, f"vllm.v1.{name}", module)
    for owner in (KVCacheCoordinator, HybridKVCacheCoordinator):
        monkeypatch.setattr(owner, "cache_blocks", owner.cache_blocks)
    monkeypatch.setattr(Request, "update_block_hashes", Request.update_block_hashes)


def going_on(kv: KvSource = KvSource.HELD, outputs: tuple[int, ...] = (7,)) -> dict[str, Any]:
    """The arguments of a request that goes on."""
    return {FIELD: {NAME: {"v": 1, "resume": {"outputs": list(outputs), "kv": kv.value}}}}


@pytest.mark.parametrize("kind", [KVCacheCoordinator, HybridKVCacheCoordinator])
def test_until_it_catches_up_a_request_that_brings_kv_has_no_hashes_and_no_block_is_entered(
    engine: None, kind: type[KVCacheCoordinator]
) -> None:
    late_hashes.install()
    coordinator = kind()
    request = Request("r", 17, going_on())
    request.append()
    coordinator.cache_blocks(request, 16)
    assert (request.block_hashes, coordinator.entered, late_hashes.is_late(request)) == ([], {}, True)
    late_hashes.catch_up(request)
    assert request.block_hashes == [0, 1, 2, 3]
    coordinator.cache_blocks(request, 18)
    assert coordinator.entered == {"r": 4}
    for _ in range(2):
        request.append()
    assert request.block_hashes == [0, 1, 2, 3, 4], "from then on it is like any other"


@pytest.mark.parametrize(
    "arguments",
    [None, {}, {FIELD: None}, {FIELD: {NAME: 3}}, going_on(KvSource.NONE), going_on(outputs=())],
    ids=["none", "empty", "null", "nonsense", "without KV", "without outputs"],
)
def test_others_have_theirs_at_once(engine: None, arguments: Any) -> None:
    late_hashes.install()
    request = Request("r", 9, arguments)
    assert (request.block_hashes, late_hashes.is_late(request)) == ([0, 1], False)


def test_beside_a_coordinator_that_would_miss_them_nothing_is_put_off(engine: None) -> None:
    class Other(HybridKVCacheCoordinator):
        """One that nobody knows yet."""

        def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
            """Enter those that are full."""
            super().cache_blocks(request, num_computed_tokens)

    late_hashes.install()
    assert Request("r", 9, going_on()).block_hashes == [0, 1]
    del Other
    gc.collect()


def test_one_catches_up_in_each_step_once_nobody_waits_for_kv_any_more(engine: None) -> None:
    late_hashes.install()
    requests = {name: Request(name, 9, going_on()) for name in "abc"}
    late = late_hashes.LateOnes()
    for request in (*requests.values(), Request("new", 9)):
        late.add(request)

    def caught_up() -> str:
        return "".join(name for name, request in requests.items() if request.block_hashes)

    late.step(lambda name: name == "c")
    assert caught_up() == ""
    seen = []
    for _ in range(5):
        late.step(lambda _: False)
        seen.append(caught_up())
    assert seen == ["a", "ab", "abc", "abc", "abc"]
