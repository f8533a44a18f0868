"""How long an engine may be silent before it is killed for it."""

from pathlib import Path

import pytest

from midstream.sidecar import daemon as module
from midstream.sidecar.config import Proxy, Settings
from midstream.sidecar.daemon import HANG_WATCH_S, _Daemon
from midstream.sidecar.workers import Epoch


@pytest.mark.parametrize(("floor_s", "watch_s"), [(0.5, HANG_WATCH_S), (15.0, 15.0)])
async def test_an_engine_is_watched_no_shorter_than_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, floor_s: float, watch_s: float
) -> None:
    watched: list[float] = []

    async def is_not(engine: Epoch | str, watch_s: float) -> bool:
        watched.append(watch_s)
        return False

    monkeypatch.setattr(module, "is_hung", is_not)
    monkeypatch.setattr(module, "is_deaf", is_not)
    daemon = _Daemon(Settings(state_dir=str(tmp_path), proxy=Proxy(stall_floor_s=floor_s)), None)
    worker = daemon._workers.add("w0", "http://w0")
    await daemon._check_hang(worker, daemon._workers.begin_epoch(worker, 1, None))
    assert watched == [watch_s, watch_s]
