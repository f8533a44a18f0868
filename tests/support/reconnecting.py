"""A client that keeps the bytes it got, is cut off wherever a test wants it, and comes back for the rest."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_ID = re.compile(rb"(?:^|[\r\n])id: [^\r\n]*\.(\d+)(?=[\r\n])")


def whole_events(have: bytes) -> bytes:
    """What a client keeps of the bytes that it got: up to the last empty line. Proxies end all their events alike."""
    return have[: have.rfind(b"\n\n") + 2] if b"\n\n" in have else b""


def position_in(have: bytes) -> int:
    """The number in the last id of some whole events; 0 before the first."""
    return int((_ID.findall(have) or [b"0"])[-1])


@dataclass(slots=True)
class Connection:
    """One HTTP connection, read by hand: status, headers, and the body as far as it came."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    # Whether the body came to its own end.
    ended: bool = False

    async def head(self) -> "Connection":
        """Read the head of the answer."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().rstrip().split("\r\n")
        self.status = int(first.split()[1])
        # Such an answer has no body.
        self.ended = self.status == 204
        self.headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        return self

    async def read(self, until: int | None = None) -> bytes:
        """Read the body until it has so many bytes, ends, or breaks off."""
        if "content-length" in self.headers:
            self.body += await self.reader.readexactly(int(self.headers["content-length"]))
            self.ended = True
        while not self.ended and (until is None or len(self.body) < until):
            try:
                size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
                self.body += (await self.reader.readexactly(size + 2))[:-2]
            except (asyncio.IncompleteReadError, ConnectionError):
                return self.body
            self.ended = size == 0
        return self.body

    def cut(self) -> None:
        """Break the connection, as a client does that is killed."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(
    url: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    narrow: bool = False,
) -> AsyncIterator[Connection]:
    """Send one request. `narrow`: over a socket that holds little of what its client has not read."""
    parts = urlsplit(url)
    with socket.socket() as sock:
        if narrow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        reader, writer = await asyncio.open_connection(sock=sock.dup(), limit=1 << 16)
    told = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()
