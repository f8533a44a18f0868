"""A wire between a switch and a host that is slow, long or loses packets.

Owns two TAP devices and the frames in between, each way by itself: a frame leaves the sender when those before it have
left at the link's rate, is lost by chance, and arrives after the delay. What waits is bounded, as in a switch: what
finds no room is lost. Written for kernels without netem. It is a process (`python -m support.host_wire PID PORT PID
PORT`); the link is told on its input, a JSON object a line, can change at any time, and ends with that input.
"""

import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

READY = b"ready"
_TUNSETIFF = 0x400454CA
_TAP, _BARE = 0x0002, 0x1000
_FRAME_BYTES_MAX = 65536
# Frames that are taken of one side before the other side has its turn.
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Link:
    """What a link is, each way: `loss` of all frames; at most `queue_bytes` wait to leave."""

    bytes_per_s: float = 125e6
    delay_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int = 256 << 10


class Way:
    """One direction of a wire. Pure: time and chance are arguments."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self.link = Link()
        self._chance = chance
        self._free_at_s = 0.0
        self._number = 0
        self._under_way: list[tuple[float, int, bytes]] = []

    def take(self, now_s: float, frame: bytes) -> None:
        """A frame was sent."""
        waiting_bytes = max(self._free_at_s - now_s, 0.0) * self.link.bytes_per_s
        if waiting_bytes + len(frame) > self.link.queue_bytes:
            return
        self._free_at_s = max(self._free_at_s, now_s) + len(frame) / self.link.bytes_per_s
        if self._chance() >= self.link.loss:
            self._number += 1
            heapq.heappush(self._under_way, (self._free_at_s + self.link.delay_s, self._number, frame))

    def arrived(self, now_s: float) -> list[bytes]:
        """Frames that are there by now."""
        found = []
        while self._under_way and self._under_way[0][0] <= now_s:
            found.append(heapq.heappop(self._under_way)[2])
        return found

    def next_s(self) -> float | None:
        """When the next one arrives."""
        return self._under_way[0][0] if self._under_way else None


def tap(pid: int, name: str) -> int:
    """A new TAP device in the network of a process, up to whoever configures it there."""
    # Only here: whoever imports the link's type needs no namespaces.
    from support.hosts import inside

    with inside(pid):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _BARE))
    return device


def main(switch_pid: int, switch_port: str, host_pid: int, host_port: str) -> None:
    """Carry frames until the input ends."""
    ends = [tap(switch_pid, switch_port), tap(host_pid, host_port)]
    source = random.Random(switch_port)
    ways = [Way(source.random), Way(source.random)]
    selector = selectors.DefaultSelector()
    for index, end in enumerate(ends):
        selector.register(end, selectors.EVENT_READ, index)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ, -1)
    os.write(sys.stdout.fileno(), READY + b"\n")
    while True:
        due = [at_s for way in ways if (at_s := way.next_s()) is not None]
        for key, _ in selector.select(max(min(due) - time.monotonic(), 0.0) if due else None):
            if key.data < 0:
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                for way in ways:
                    way.link = Link(**json.loads(line))
            else:
                _take(ends[key.data], ways[key.data])
        for index, way in enumerate(ways):
            for frame in way.arrived(time.monotonic()):
                _put(ends[1 - index], frame)


def _take(end: int, way: Way) -> None:
    for _ in range(_AT_ONCE):
        try:
            way.take(time.monotonic(), os.read(end, _FRAME_BYTES_MAX))
        except (BlockingIOError, OSError):
            return


def _put(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:
        # The other end is down or its queue is full: the frame is lost, as on any wire.
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
