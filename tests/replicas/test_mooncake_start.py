"""A Mooncake that hangs when its client is started, without Mooncake."""

import time
from pathlib import Path

import pytest

from midstream.sidecar.replicas import mooncake_objects
from midstream.sidecar.replicas.contract import Refusal, ReplicaError
from midstream.sidecar.replicas.mooncake_objects import Mooncake, MooncakeObjects


def test_a_client_that_hung_when_it_was_started_is_not_tried_again_at_every_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_objects, "START_S", 0.5)
    monkeypatch.setattr(mooncake_objects, "START_AGAIN_S", 0.4)
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 30\n")
    hangs.chmod(0o700)
    objects = MooncakeObjects(Mooncake(master="127.0.0.1:1", host="127.0.0.1", python=hangs))

    def reason() -> Refusal:
        with pytest.raises(ReplicaError) as caught:
            objects.present(["a"])
        return caught.value.reason

    try:
        assert reason() is Refusal.SLOW
        began_s = time.monotonic()
        assert reason() is Refusal.UNREACHABLE
        assert time.monotonic() - began_s < 0.3
        time.sleep(0.5)
        assert reason() is Refusal.SLOW
    finally:
        objects.close()
