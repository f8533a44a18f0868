"""A worker for benchmarks: streams completions in vLLM's form as cheaply as Python can, each token stamped with its
time.

Owns one process. A request says how many tokens it wants (`max_tokens`) and how far apart (`bench_gap_s`; 0: as fast
as the reader takes them, one token a write). The stamp is CLOCK_MONOTONIC in nanoseconds, the same clock for all
processes. With `--nodes` it is so many nodes of a fleet, each at a port of its own, which say of themselves that they
are ready; a gateway takes their streams for those of whole sidecars.
"""

import argparse
import asyncio
import itertools
import json
import math
import resource
import time
from typing import cast

import uvloop

_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
    b"Server: bench\r\n\r\n"
)
_CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1700000000,'
    b'"model":"bench","choices":[{"index":0,"text":" %d","logprobs":null,"finish_reason":%b,"stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[%d]}]}\n\n'
)
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
# How many tokens a stream that is not paced writes before the others have their turn.
_TURN = 4
_PHASES = 16
_started = itertools.count()


_RECORD = json.dumps(
    {
        "v": 1, "name": "node", "role": "node", "url": "http://127.0.0.1", "readiness": "ready", "load": "idle",
        "models": [], "keys": [], "slot_count": 1 << 20, "zone": "", "version": "bench", "formerly": None,
    }
).encode()  # fmt: skip
_NODE = (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(_RECORD)) + _RECORD


class _Stream(asyncio.Protocol):
    """One connection: requests one after another."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._left = 0
        self._gap_s = 0.0
        self._next_s = 0.0
        self._paused = self._closed = self._waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not derived from asyncio's.
        writable = cast(asyncio.Transport, transport)
        writable.set_write_buffer_limits(high=16384)
        self._write = writable.write

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._waiting:
            self._waiting = False
            self._turn()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        if head.startswith(b"GET "):
            self._buffer = body
            self._write(_NODE)
            return
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        if len(body) < length:
            return
        self._buffer = body[length:]
        wanted = json.loads(body[:length])
        self._left = int(wanted["max_tokens"])
        self._gap_s = float(wanted.get("bench_gap_s", 0))
        self._write(_HEAD)
        # Paced streams take turns in fixed phases of the gap: the loop's timers know milliseconds only, and streams
        # that share one by chance would make every run another measurement.
        phase = next(_started) % _PHASES / _PHASES
        now_s = self._loop.time()
        gaps = math.ceil(now_s / self._gap_s) if self._gap_s else 0
        self._next_s = (gaps + phase) * self._gap_s if self._gap_s else now_s
        self._loop.call_at(self._next_s, self._turn)

    def _turn(self) -> None:
        for _ in range(1 if self._gap_s else _TURN):
            if self._closed:
                return
            if self._paused:
                self._waiting = True
                return
            self._left -= 1
            finish = b"null" if self._left else b'"length"'
            chunk = _CHUNK % (time.monotonic_ns(), finish, self._left)
            self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
            if not self._left:
                self._write(_END)
                return
        if self._gap_s:
            self._next_s += self._gap_s
            self._loop.call_at(self._next_s, self._turn)
        else:
            self._loop.call_soon(self._turn)


async def _serve(ports: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Stream, "127.0.0.1", 0, backlog=4096) for _ in range(ports)]
    print(",".join(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers), flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1, help="how many nodes of a fleet to be")
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    uvloop.run(_serve(arguments.nodes))


if __name__ == "__main__":
    main()
