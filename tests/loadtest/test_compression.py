"""What is measured of compression is measured on blocks that come back as they were."""

import json
import random
import struct
from pathlib import Path

import pytest
from contracts.store_suite import snapshot_of

from midstream.loadtest import compression
from midstream.session.disk_store import DiskStore


@pytest.mark.parametrize("width", [1, 2, 4])
def test_planes_are_put_together_again(width: int) -> None:
    raw = random.Random(1).randbytes(4000)
    planes = compression.split(raw, width)
    assert compression.merged(planes, width) == raw
    assert planes[: 4000 // width] == raw[::width]


def test_ratio_and_speed_of_a_store_s_blocks_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "ROUNDS", 1)
    chance = random.Random(2)
    # Values of one exponent: its byte is nearly the same in all of them.
    blocks = [struct.pack("<4096f", *(chance.uniform(1, 2) for _ in range(4096))) for _ in range(4)]
    with DiskStore(tmp_path / "store").begin() as draft:
        draft.publish(snapshot_of(tuple(draft.put_chunk(block) for block in blocks)))
    assert compression.main([str(tmp_path / "store"), "--width", "4", "--threads", "1,2"]) == 0
    first, *ways = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # The last block of a snapshot may hold anything.
    assert (first["blocks"], first["bytes"]) == (3, 3 * 16384)
    by_way = {(way["planes"], way["level"]): way for way in ways if "planes" in way}
    assert len(by_way) == 6
    assert by_way[4, 1]["ratio"] < by_way[1, 1]["ratio"] <= 1.01
    assert all(way["compress_mb_per_s"] > 0 and way["decompress_mb_per_s"] > 0 for way in by_way.values())
    assert [way["threads"] for way in ways[6:]] == [1, 2]


def test_a_store_without_snapshots_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DiskStore(tmp_path / "store").close()
    assert compression.main([str(tmp_path / "store")]) == 1
    assert "has no snapshots" in capsys.readouterr().err
    assert compression.main([str(tmp_path)]) == 1
