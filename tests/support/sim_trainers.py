"""Training loops on a simulated GPU, started and ended by tests; what they wrote is held against an undisturbed run."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from midstream.sidecar.processes import Process, read_process
from support.sim_cuda import VARIABLE, SimCuda, wait_for
from support.sim_trainer import losses

SUPPORT = Path(__file__).parents[1]
GIB = 1 << 30


@dataclass
class Trainer:
    """One loop."""

    popen: "subprocess.Popen[bytes]"
    out: Path

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.popen.pid

    @property
    def process(self) -> Process:
        """As keepers know it."""
        found = read_process(self.pid)
        assert found is not None
        return found

    def written(self) -> list[str]:
        """Its losses up to now."""
        return self.out.read_text().splitlines() if self.out.exists() else []

    def goes_on(self, more: int = 5) -> None:
        """Wait for so many losses more."""
        count = len(self.written()) + more
        wait_for(lambda: len(self.written()) >= count, 10, lambda: f"{self.pid} writes nothing after {count - more}")

    def is_undisturbed(self) -> None:
        """Assert that nothing was lost, repeated or changed."""
        written = self.written()
        assert written == losses(len(written))


def environ(sim: SimCuda) -> dict[str, str]:
    """What helpers and trainers have to be started with."""
    path = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, VARIABLE: str(sim.path), "PYTHONPATH": path}


@contextmanager
def trainers(
    sim: SimCuda, folder: Path, count: int = 1, *options: str, more: Mapping[str, str] | None = None
) -> Iterator[list[Trainer]]:
    """So many loops, each with 2 GiB on a GPU of its own; they are killed at the end."""
    with ExitStack() as stack:
        found = []
        for index in range(count):
            out = folder / f"losses-{index}"
            command = [
                sys.executable, "-m", "support.sim_trainer", str(sim.path), str(out),
                "--held", f"GPU-{index}={2 * GIB}", *options,
            ]  # fmt: skip
            popen = subprocess.Popen(command, env={**environ(sim), **(more or {})})
            stack.callback(popen.wait)
            stack.callback(popen.kill)
            found.append(Trainer(popen, out))
        for trainer in found:
            trainer.goes_on(3)
        yield found
