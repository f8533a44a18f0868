"""A vLLM that is started by hand, the way the documentation says, and may be started again."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from midstream.adapters.vllm.adapter import KV_TRANSFER_CONFIG
from midstream.loadtest.harness import end_tree
from midstream.sidecar import plugin_path
from midstream.sidecar.environments import VLLM_ENVIRON

from .vllm_rig import START_S, vllm_command


class ByHand:
    """One engine; `environ` is what its operator exports."""

    def __init__(self, folder: Path, name: str, port: int, environ: Mapping[str, str], *options: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / f"{name}.log"
        # The project's own Python path is no part of an operator's shell.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MIDSTREAM_")}
        self._environ = {**inherited, **VLLM_ENVIRON, **environ, "PYTHONPATH": str(plugin_path.ensure(folder))}
        config = json.dumps(KV_TRANSFER_CONFIG)
        self._command = [*vllm_command(*options), "--port", str(port), "--kv-transfer-config", config]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and do not wait."""
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                self._command, env=self._environ, stdout=sink, stderr=sink, start_new_session=True
            )

    def wait_ready(self) -> None:
        """Wait until it answers; RuntimeError with the end of its log if it does not."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            if self.process is None or self.process.poll() is not None:
                break
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"vLLM did not come up:\n{self.log.read_text(errors='replace')[-4000:]}")

    def kill_front_end(self) -> list[psutil.Process]:
        """SIGKILL to the process that the operator has started, alone; what it leaves behind."""
        assert self.process is not None
        left = [p for p in psutil.Process(self.process.pid).children(recursive=True) if "VLLM" in p.name()]
        self.process.kill()
        self.process.wait(10)
        self.process = None
        return left

    def kill(self) -> None:
        """SIGKILL all of it, and wait until it is gone."""
        if self.process is None:
            return
        end_tree(self.process, 10)
        self.process = None
