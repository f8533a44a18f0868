"""What is parked in measurements: `python -m midstream.loadtest.gpu.park_target KIND ...`, a real process on the GPU.

Owns three of them. `train` writes the loss of each step of a small network, dropout and Adam among it; `image` has so
many bytes, a captured graph and a generator; `pool` has memory that other processes can map. Each says `ready` when it
is, and `image` and `pool` then answer one line for each line that they are sent. They know nothing of being parked.
"""

import hashlib
import json
import os
import socket
import sys
import time
from typing import Any

CHUNK_BYTES = 1 << 30
DRAWN = 4


def _say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def train(steps: int, pause_s: float) -> None:
    """So many steps; the same each time they are run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda")
    layers = [torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(1024, 512)]
    network = torch.nn.Sequential(*layers).to(device)
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3)
    _say(ready=True)
    for step in range(steps):
        given = torch.randn(256, 512, device=device)
        loss = (network(given) - given.roll(1, dims=1)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        _say(step=step, loss=loss.item().hex())
        time.sleep(pause_s)


def image(size_bytes: int) -> None:
    """Memory, a graph and a generator; each line is answered with what they are now, and with what they should be."""
    import torch

    device = torch.device("cuda")
    chunks = []
    for index in range(max(size_bytes // CHUNK_BYTES, 1)):
        words = min(size_bytes, CHUNK_BYTES) // 4
        chunks.append(torch.arange(words, dtype=torch.int32, device=device).mul_(2 * index + 3))
    counted = torch.zeros(1, dtype=torch.int64, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        counted.add_(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counted.add_(1)
    counted.zero_()

    def sums() -> list[int]:
        # In pieces: one sum of all would need as much memory again for its wider words.
        return [sum(int(part.sum(dtype=torch.int64).item()) for part in chunk.split(1 << 26)) for chunk in chunks]

    known, replays = sums(), 0
    state = torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    _say(ready=True)
    for line in sys.stdin:
        word = line.strip()
        if word == "busy":
            # A kernel that runs for some seconds, of which the answer does not wait.
            torch.cuda._sleep(int(6e9))
            _say(busy=True)
            continue
        began_s = time.perf_counter()
        graph.replay()
        replays += 1
        first_s = time.perf_counter()
        torch.cuda.set_rng_state(state)
        wanted = torch.rand(DRAWN, device=device).tolist()
        torch.cuda.set_rng_state(state)
        drawn = torch.rand(DRAWN, device=device).tolist()
        state = torch.cuda.get_rng_state()
        is_well = sums() == known and int(counted.item()) == replays and wanted == drawn
        _say(
            well=is_well,
            replays=replays,
            first_s=first_s - began_s,
            drawn=hashlib.sha256(str(drawn).encode()).hexdigest(),
        )


def pool(size_bytes: int, path: str) -> None:
    """A pool that can be shared; its descriptor goes to whoever listens at `path`. Lines: fill N, read, close."""
    from ...session import vram

    made = vram.create_device_pool(size_bytes, 0)
    with socket.socket(socket.AF_UNIX) as sink:
        sink.connect(path)
        socket.send_fds(sink, [b"pool"], [made.fd])
    _say(ready=True, fd=made.fd, size=made.size_bytes)
    for line in sys.stdin:
        word, _, value = line.strip().partition(" ")
        if word == "fill":
            fill(made.address, made.size_bytes, int(value))
            _say(done=True)
        elif word == "read":
            _say(first=first(made.address), last=first(made.address + made.size_bytes - 4))
        elif word == "close":
            os.close(made.fd)
            _say(done=True)


def fill(address: int, size_bytes: int, value: int) -> None:
    """Write one 32-bit word all over."""
    from cuda.bindings import driver

    from ...session import vram

    with vram.current(0):
        for status in (driver.cuMemsetD32(address, value, size_bytes // 4), driver.cuCtxSynchronize()):
            if int(status[0]) != 0:
                raise SystemExit(f"cannot write: {status[0]}")


def first(address: int) -> int:
    """The 32-bit word at an address."""
    from cuda.bindings import driver

    from ...session import vram

    held = bytearray(4)
    with vram.current(0):
        [status] = driver.cuMemcpyDtoH(held, address, 4)
    if int(status) != 0:
        raise SystemExit(f"cannot read: {status}")
    return int.from_bytes(held, "little")


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    match kind:
        case "train":
            train(int(arguments[0]), float(arguments[1]))
        case "image":
            image(int(arguments[0]))
        case "pool":
            pool(int(arguments[0]), arguments[1])
        case _:
            sys.exit(f"no such target: {kind}")
