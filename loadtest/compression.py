"""What compression saves of real KV and what it costs: `python -m midstream.loadtest.compression STORE --width 2`.

Measures the blocks of a store's snapshots, as they are and with the bytes of their values split into planes (all first
bytes, then all second ones, ...), at several levels of zstd and by several threads. One line of JSON a way. It writes
nothing to the store. `--width` is how many bytes a value has: 2 for bf16, 4 for fp32.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zstandard

from ..session.chunk import encode
from ..session.disk_store import DiskStore
from ..session.errors import MidstreamError

LEVELS = (-1, 1, 3)
SAMPLE_BYTES = 64 << 20
ROUNDS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when the store has no blocks."""
    parser = argparse.ArgumentParser(prog="midstream.loadtest.compression", description="What compression saves of KV.")
    parser.add_argument("store", type=Path, help="folder with snapshots, as --store-dir names it")
    parser.add_argument("--width", type=int, choices=(1, 2, 4), default=2, help="bytes a value: 2 for bf16, 4 for fp32")
    parser.add_argument("--threads", default="1,2,4,8", help="numbers of threads to encode chunks with")
    options = parser.parse_args(arguments)
    try:
        blocks = sample(options.store)
    except MidstreamError as error:
        print(f"compression: {error}", file=sys.stderr)
        return 1
    if not blocks:
        print(f"compression: {options.store} has no snapshots; let some sessions run with --store-dir", file=sys.stderr)
        return 1
    size = sum(map(len, blocks))
    print(json.dumps({"blocks": len(blocks), "bytes": size, "cpus": os.cpu_count()}))
    for width in sorted({1, options.width}):
        for level in LEVELS:
            print(json.dumps(measured(blocks, width, level)), flush=True)
    for count in map(int, options.threads.split(",")):
        with ThreadPoolExecutor(count) as threads:
            seconds = fastest(lambda threads=threads: list(threads.map(encode, blocks)))  # type: ignore[misc]
        print(json.dumps({"threads": count, "encode_mb_per_s": round(size / seconds / 1e6)}), flush=True)
    return 0


def sample(root: Path) -> list[bytes]:
    """Blocks of a store's latest snapshots, SAMPLE_BYTES at most. Raises StoreError."""
    store = DiskStore(root, write=False)
    blocks: dict[str, bytes] = {}
    left = SAMPLE_BYTES
    for line in store.list():
        manifest = store.named(line.session, line.snapshot)
        # The last block may not be full: what is behind its positions is anything.
        for name in manifest.chunks[:-1] if manifest is not None else ():
            if name not in blocks and left > 0:
                blocks[name] = store.get_chunk(name)
                left -= len(blocks[name])
    store.close()
    return list(blocks.values())


def measured(blocks: Sequence[bytes], width: int, level: int) -> dict[str, object]:
    """Ratio and speeds of one way, in one thread."""
    size = sum(map(len, blocks))
    planes = [split(raw, width) for raw in blocks]
    frames = [zstandard.ZstdCompressor(level=level).compress(raw) for raw in planes]
    decompress = zstandard.ZstdDecompressor().decompress
    assert [merged(decompress(frame), width) for frame in frames] == list(blocks)
    compressing = fastest(lambda: [zstandard.ZstdCompressor(level=level).compress(raw) for raw in planes])
    decompressing = fastest(lambda: [decompress(frame) for frame in frames])
    return {
        "planes": width,
        "level": level,
        "ratio": round(sum(map(len, frames)) / size, 3),
        "compress_mb_per_s": round(size / compressing / 1e6),
        "decompress_mb_per_s": round(size / decompressing / 1e6),
        "split_mb_per_s": None
        if width == 1
        else round(size / fastest(lambda: [split(r, width) for r in blocks]) / 1e6),
        "merge_mb_per_s": None
        if width == 1
        else round(size / fastest(lambda: [merged(r, width) for r in planes]) / 1e6),
    }


def split(raw: bytes, width: int) -> bytes:
    """All first bytes of the values, then all second ones, and so on."""
    return raw if width == 1 else b"".join(raw[place::width] for place in range(width))


def merged(planes: bytes, width: int) -> bytes:
    """What `split` was made of."""
    if width == 1:
        return planes
    raw, count = bytearray(len(planes)), len(planes) // width
    for place in range(width):
        raw[place::width] = planes[place * count : (place + 1) * count]
    return bytes(raw)


def fastest(work: Callable[[], object]) -> float:
    """The seconds that the fastest of a few rounds takes."""
    seconds = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main())
