"""A real etcd for a test: its process, its data in a folder of the test, its ports, and what can befall it."""

import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from midstream.session.ports import free_port

VARIABLE = "MIDSTREAM_TEST_ETCD"
_START_S = 30.0


def binary() -> Path | None:
    """The etcd of the tests; None where none was named."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else None


class EtcdServer:
    """One etcd, alone or of a cluster."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        name: str = "alone",
        peers: dict[str, str] | None = None,
        scheme: str = "http",
    ) -> None:
        found = binary()
        assert found is not None
        self.folder = folder / name
        self.url = f"{scheme}://127.0.0.1:{free_port()}"
        peer = (peers or {}).get(name) or f"http://127.0.0.1:{free_port()}"
        cluster = ",".join(f"{n}={url}" for n, url in (peers or {name: peer}).items())
        self._argv = [
            *(str(found), "--name", name, "--data-dir", str(self.folder)),
            *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster),
            *options,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> "EtcdServer":
        """Start, also again with the data that there is."""
        with (self.folder.parent / f"{self.folder.name}.log").open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Until it answers as one that has a leader."""
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:
                    if b'"true"' in answer.read():
                        return
            except (urllib.error.URLError, OSError):
                pass
            assert time.monotonic() < deadline_s, f"etcd did not start; see {self.folder}.log"
            time.sleep(0.05)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Remove its data."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)
