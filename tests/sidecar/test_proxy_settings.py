"""What the proxy is told about the engines behind it."""

from pathlib import Path

from midstream.adapters.transformers.adapter import TransformersAdapter
from midstream.adapters.vllm.adapter import VllmAdapter
from midstream.proxy.dialects.hiding import Hiding
from midstream.sidecar.config import Settings
from midstream.sidecar.proxy_settings import proxy_settings


def test_an_engine_s_own_habits_are_those_of_its_adapter(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    for adapter, hiding in ((VllmAdapter(), Hiding.NULL), (TransformersAdapter(), Hiding.ABSENT)):
        told = proxy_settings(settings, adapter)
        assert (told.private_paths, told.hiding) == (adapter.private_paths, hiding)


def test_beside_engines_that_others_start_nothing_of_any_operator_is_served(tmp_path: Path) -> None:
    told = proxy_settings(Settings(state_dir=str(tmp_path)), None)
    assert told.private_paths >= VllmAdapter.private_paths | TransformersAdapter.private_paths
    assert "/collective_rpc" in told.private_paths
