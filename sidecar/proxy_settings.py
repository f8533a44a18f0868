"""From the sidecar's settings to the proxy's."""

from ..adapters.contract import EngineAdapter
from ..adapters.registry import ADAPTERS
from ..proxy.dialects.hiding import Hiding
from ..proxy.policy import Policy
from ..proxy.settings import ProxySettings
from ..proxy.stall import StallPolicy
from .config import Settings


def proxy_settings(settings: Settings, adapter: EngineAdapter | None) -> ProxySettings:
    """What the proxy of this sidecar does; `adapter` is None where others start the engines, which are vLLM then."""
    as_null = adapter is None or adapter.capabilities.hides_ids_as_null
    proxy = settings.proxy
    return ProxySettings(
        body_bytes_max=proxy.body_bytes_max,
        keepalive_s=proxy.keepalive_s,
        takeovers_max=proxy.takeovers_max,
        fruitless_takeovers_max=proxy.fruitless_takeovers_max,
        choices_max=proxy.choices_max,
        policy=Policy(proxy.policy),
        stall=StallPolicy(floor_s=proxy.stall_floor_s, factor=proxy.stall_factor),
        assign_seed=proxy.assign_seed,
        reattach_s=proxy.reattach_s,
        reattach_stream_bytes_max=proxy.reattach_stream_bytes_max,
        reattach_bytes_max=proxy.reattach_bytes_max,
        reattach_streams_max=proxy.reattach_streams_max,
        hiding=Hiding.NULL if as_null else Hiding.ABSENT,
        private_paths=adapter.private_paths if adapter is not None else _every_private_path(),
    )


def _every_private_path() -> frozenset[str]:
    """Of all engines: which ones others start is not known, and some of these paths run code that the caller names."""
    return frozenset().union(*(known.private_paths for known in ADAPTERS.values()))
