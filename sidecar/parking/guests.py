"""Who runs in a group that is parked, and how it is asked to stand still, to save, to wake and to prove itself.

Owns the contract, and its fulfilment for a process of which nothing is known but its pid. A worker's is
`worker_guest.py`.
"""

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping
from typing import Any, Protocol

from ...session.errors import ParkError

PROBE_OUTPUT_MAX = 4096


class Guest(Protocol):
    """Every call is bounded by whoever makes it, and raises ParkError when it cannot be done."""

    async def quiesce(self) -> None:
        """Give it nothing new, and bring it to a step boundary."""
        ...

    async def save(self) -> Mapping[str, Any]:
        """Save or move its sessions; what it answers to `prove` now, which is kept with the record."""
        ...

    async def wake(self) -> None:
        """It was never locked: it takes part again."""
        ...

    async def prove(self, known: Mapping[str, Any]) -> None:
        """It was locked: it shows that it is what it was, and takes part again."""
        ...

    def lost(self, text: str) -> None:
        """It is being killed."""
        ...


class BareProcess:
    """A process by itself: it is stopped wherever it is. `probe` is a shell's command that says 0 when it is well."""

    def __init__(self, probe: str | None = None) -> None:
        self._probe = probe

    async def quiesce(self) -> None:
        """The driver stops it between two of its calls."""

    async def save(self) -> Mapping[str, Any]:
        """What it has is in its image."""
        return {} if self._probe is None else {"command": self._probe}

    async def wake(self) -> None:
        """It goes on by itself."""

    async def prove(self, known: Mapping[str, Any]) -> None:
        """By its command, if there is one."""
        command = self._probe or known.get("command")
        if command is None:
            return
        process = await asyncio.create_subprocess_shell(
            str(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            said, _ = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            told = said[-PROBE_OUTPUT_MAX:].decode(errors="replace").strip()
            raise ParkError(f"the probe says no (exit status {process.returncode}): {told or 'nothing more'}")

    def lost(self, text: str) -> None:
        """Nobody has to be told."""
