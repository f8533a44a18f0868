"""From the sidecar's settings to the proxy's."""

from ..adapters.contract import EngineAdapter
from ..proxy.dialects.hiding import Hiding
from ..proxy.settings import ProxySettings
from ..proxy.stall import StallPolicy
from .config import Settings


def proxy_settings(settings: Settings, adapter: EngineAdapter | None, private_paths: frozenset[str]) -> ProxySettings:
    """What the proxy of this sidecar does; `adapter` is None where others start the engines, which are vLLM then."""
    as_null = adapter is None or adapter.capabilities.hides_ids_as_null
    proxy = settings.proxy
    return ProxySettings(
        body_bytes_max=proxy.body_bytes_max,
        keepalive_s=proxy.keepalive_s,
        takeovers_max=proxy.takeovers_max,
        stall=StallPolicy(floor_s=proxy.stall_floor_s, factor=proxy.stall_factor),
        assign_seed=proxy.assign_seed,
        hiding=Hiding.NULL if as_null else Hiding.ABSENT,
        private_paths=private_paths,
    )
