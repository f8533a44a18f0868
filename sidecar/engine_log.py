"""What an engine prints: forwarded line by line to the log, the last lines kept for errors.

Invariant: whatever an engine prints, memory stays bounded; a line is cut at `LINE_BYTES_MAX`, and reading goes on
whatever the bytes are, so that an engine never blocks on a full pipe.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator

LINE_BYTES_MAX = 4096
LAST_LINES = 20
_READ_BYTES = 1 << 16


class LineCutter:
    """Bytes in, lines out; the rest of a line that is too long is dropped and marked."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._is_cut = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that `data` completes."""
        *complete, rest = data.replace(b"\r", b"\n").split(b"\n")
        for part in complete:
            self._take(part)
            yield from self.end()
        self._take(rest)

    def end(self) -> Iterator[str]:
        """What was begun, as the last line; nothing for an empty one."""
        text = self._begun.decode(errors="replace").rstrip()
        if text:
            yield text + (" [line cut]" if self._is_cut else "")
        self._begun.clear()
        self._is_cut = False

    def _take(self, part: bytes) -> None:
        room = LINE_BYTES_MAX - len(self._begun)
        self._begun += part[:room]
        self._is_cut = self._is_cut or len(part) > room


class EngineLog:
    """Forwards one engine's output; `last` are the lines that an error should show."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._log = logging.getLogger(f"midstream.engine.{worker}")
        self.last: deque[str] = deque(maxlen=LAST_LINES)

    async def forward(self, stream: asyncio.StreamReader) -> None:
        """Read until the end; all processes that hold the pipe must be gone for that."""
        cutter = LineCutter()
        while data := await stream.read(_READ_BYTES):
            for line in cutter.feed(data):
                self._say(line)
        for line in cutter.end():
            self._say(line)

    def last_text(self) -> str:
        """The last lines, indented, for the end of an error; empty when nothing was printed."""
        return "".join(f"\n    {line}" for line in self.last)

    def _say(self, line: str) -> None:
        self.last.append(line)
        self._log.info("[%s] %s", self._worker, line)
