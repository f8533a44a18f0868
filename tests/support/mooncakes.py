"""A real Mooncake for tests: its master, and clients that lend memory, each a process that can be killed."""

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from midstream.session.ports import free_port
from midstream.sidecar.replicas.mooncake_objects import Mooncake

VARIABLE = "MIDSTREAM_TEST_MOONCAKE_PYTHON"
START_S = 30.0

# Lends memory until it is killed: master's address, bytes, its own address.
LENDER = """
import sys, time
import mooncake.store
client = mooncake.store.MooncakeDistributedStore()
code = client.setup(sys.argv[3], "P2PHANDSHAKE", int(sys.argv[2]), 16 << 20, "tcp", "", sys.argv[1])
print(code, flush=True)
time.sleep(3600)
"""


def python() -> Path | None:
    """The interpreter that has Mooncake; None where none was named."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


@dataclass(slots=True)
class Deployment:
    """One master and whoever lends memory."""

    port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    flags: tuple[str, ...] = ()
    master: "subprocess.Popen[bytes] | None" = None
    lenders: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def start_master(self) -> None:
        found = python()
        assert found is not None
        command = [
            str(found.with_name("mooncake_master")), "-port", str(self.port), "-metrics_port", str(self.admin_port),
            "-metrics_host", "127.0.0.1", "-rpc_address", "127.0.0.1", *self.flags,
        ]  # fmt: skip
        self.master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}/health", timeout=1).close()
                return
            except (urllib.error.URLError, OSError):
                assert self.master.poll() is None, f"the master ended with {self.master.returncode}"
                assert time.monotonic() < deadline, "the master does not start"
                time.sleep(0.05)

    def lend(self, size_bytes: int) -> "subprocess.Popen[bytes]":
        command = [str(python()), "-I", "-c", LENDER, f"127.0.0.1:{self.port}", str(size_bytes), "127.0.0.1"]
        environ = {**os.environ, "GLOG_minloglevel": "3"}
        lender = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ)
        assert lender.stdout is not None
        deadline = time.monotonic() + START_S
        while (line := lender.stdout.readline()) and not line.strip().lstrip(b"-").isdigit():
            assert time.monotonic() < deadline
        assert line.strip() == b"0", line
        self.lenders.append(lender)
        return lender

    def config(self, **changes: object) -> Mooncake:
        found = python() or Path(sys.executable)
        asked: dict[str, object] = {
            "master": f"127.0.0.1:{self.port}", "admin": f"http://127.0.0.1:{self.admin_port}", "python": found
        }  # fmt: skip
        return Mooncake(**(asked | changes))  # type: ignore[arg-type]

    def kill_master(self) -> None:
        assert self.master is not None
        self.master.send_signal(signal.SIGKILL)
        self.master.wait()

    def close(self) -> None:
        for process in (*self.lenders, self.master):
            if process is not None:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
