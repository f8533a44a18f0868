"""What the sidecar's own processes take: CPU seconds and memory, looked at once a second.

Owns the sampling. A process that comes and goes (a new mover) is counted while it is there.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

EVERY_S = 1.0


@dataclass(slots=True)
class Usage:
    """Of one kind of process, over a pass."""

    cpu_s: float = 0.0
    rss_bytes_max: int = 0


class Resources:
    """Follows processes by their kind (`sidecar`, `mover`, `holder`)."""

    def __init__(self, pids: Callable[[], Awaitable[Mapping[str, int]]]) -> None:
        self._pids = pids
        self._seen: dict[psutil.Process, tuple[str, float, float]] = {}
        self.usage: dict[str, Usage] = {}

    async def follow(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Look once."""
        for kind, pid in (await self._pids()).items():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process = psutil.Process(pid)
                times = process.cpu_times()
                cpu_s = times.user + times.system
                _, first_s, _ = self._seen.get(process, (kind, cpu_s, cpu_s))
                self._seen[process] = (kind, first_s, cpu_s)
                usage = self.usage.setdefault(kind, Usage())
                usage.rss_bytes_max = max(usage.rss_bytes_max, process.memory_info().rss)
        for kind, usage in self.usage.items():
            usage.cpu_s = sum(last_s - first_s for k, first_s, last_s in self._seen.values() if k == kind)

    def told(self, duration_s: float) -> dict[str, dict[str, Any]]:
        """For the summary: percent of one core in the mean, and the most memory."""
        return {
            kind: {
                "cpu_s": round(usage.cpu_s, 2),
                "cpu_percent": round(100 * usage.cpu_s / duration_s, 1) if duration_s else 0.0,
                "rss_mib_max": round(usage.rss_bytes_max / 2**20, 1),
            }
            for kind, usage in sorted(self.usage.items())
        }
