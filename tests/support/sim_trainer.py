"""A training loop on a simulated GPU: `python -m support.sim_trainer SOCKET LOSSES --held GPU-0=BYTES`.

Its weights lie on the device, and each loss comes of all that were before: whatever is lost or done twice shows in all
that follow. `losses(count)` is what an undisturbed run writes.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from support.sim_cuda import SimProcess

STEP_S = 0.005


def begin(device: dict[str, Any]) -> None:
    """Weights as they are at the start."""
    device.update(weight=1, step=0)


def advance(device: dict[str, Any]) -> str:
    """One step: its line."""
    device["weight"] = (device["weight"] * 6364136223846793005 + 1442695040888963407) % 2**64
    device["step"] += 1
    return f"{device['step']} {device['weight'] / 2**64:.12f}"


def losses(count: int) -> list[str]:
    """Of a run that nobody disturbed."""
    device: dict[str, Any] = {}
    begin(device)
    return [advance(device) for _ in range(count)]


def main() -> None:
    """Train until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("losses", type=Path)
    parser.add_argument("--held", action="append", default=[])
    parser.add_argument("--ipc", action="store_true")
    parser.add_argument("--long", type=float, default=0.0)
    options = parser.parse_args()
    held = {uuid: int(size) for uuid, _, size in (text.partition("=") for text in options.held)}
    cuda = SimProcess(options.socket, held, has_ipc=options.ipc)
    with cuda.call() as device:
        begin(device)
    with options.losses.open("w") as sink:
        while True:
            with cuda.call() as device:
                sink.write(advance(device) + "\n")
                sink.flush()
                time.sleep(options.long)
            time.sleep(STEP_S)


if __name__ == "__main__":
    main()
