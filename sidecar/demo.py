"""The demo: a streamed answer whose worker is killed, and a table that says what became of it.

Starts a sidecar with two real workers, streams one answer undisturbed and once more with a SIGKILL at a named token,
and compares. What is shown is measured here, from the client's side, but for the figures that the sidecar reports of
itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from ..session.errors import EngineError, MidstreamError
from . import environments
from .cli_inspect import ask
from .demo_client import Answer, lost_and_duplicated, read_stream
from .environment_build import Report

CUT_AT_TOKEN = 48
TOKENS_MAX = 120
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 300.0
CHAT = "/v1/chat/completions"
PROMPT = "Write a long story about a dog named Max who travels the world."


@dataclass(frozen=True, slots=True)
class Result:
    """What `midstream demo --json` prints."""

    engine: str
    tokens: int
    cut: int
    lag: int
    outcome: str
    tier: str
    identical: bool
    lost: int
    duplicated: int
    gap_ms: float
    kv_tokens_loaded: int
    tokens_recomputed: int
    killed: str

    @property
    def good(self) -> bool:
        """Whether the demo showed what it is meant to show."""
        return self.identical and not self.lost and not self.duplicated and self.outcome == "exact"


def run(*, engine: str, as_json: bool) -> int:
    """Show it; 0 only if the answer was identical, complete and exact."""
    console = Console(stderr=as_json)
    progress = environments.Progress()
    command, environ = _engine_command(engine, progress)
    with (
        tempfile.TemporaryDirectory(prefix="midstream-demo-", dir=_memory_dir()) as folder,
        _sidecar(command, environ, Path(folder), progress) as url,
    ):
        progress.close()
        result = _show(url, engine, console)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        console.print(_table(result))
    return 0 if result.good else 1


def _memory_dir() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _engine_command(engine: str, progress: Report) -> tuple[list[str], Mapping[str, str]]:
    if engine == "vllm":
        python = environments.vllm_python(progress)
        model = environments.model(progress)
        command = [
            str(python), str(python.with_name("vllm")), "serve", str(model), "--served-model-name", "smollm2",
            "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8",
        ]  # fmt: skip
        return command, {**os.environ, **environments.VLLM_ENVIRON}
    python = environments.transformers_python(progress)
    model = environments.model(progress)
    command = [
        str(python), "-m", "midstream.adapters.transformers.server", "--model", str(model),
        "--served-model-name", "smollm2", "--threads", "1",
    ]  # fmt: skip
    return command, dict(os.environ)


@contextmanager
def _sidecar(command: list[str], environ: Mapping[str, str], folder: Path, progress: Report) -> Iterator[str]:
    log = folder / "sidecar.log"
    argv = [
        sys.executable, "-m", "midstream.sidecar.cli", "run", "--workers", "2", "--port", "0",
        "--state-dir", str(folder / "state"), "--log-format", "json", "--", *command,
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, env=dict(environ), stdout=sink, stderr=subprocess.STDOUT)
    try:
        yield _wait_ready(process, log, progress)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _stop_holder(folder / "state")


def _stop_holder(state: Path) -> None:
    """The holder outlives a sidecar; that of a demo has nothing left to hold."""
    for process in psutil.process_iter(["cmdline"]):
        if str(state / "holder.sock") in (process.info["cmdline"] or ()):
            process.terminate()


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path, progress: Report) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    url = ""
    while time.monotonic() < deadline:
        progress("starting two workers")
        if process.poll() is not None:
            raise EngineError(f"the sidecar ended early:\n{_last_lines(log)}")
        url = url or _listening(log)
        if url:
            workers = _workers(url)
            if len(workers) == 2 and all(w["state"] == "ready" for w in workers):
                return url
            if any(w["state"] == "failed" for w in workers):
                break
        time.sleep(0.2)
    raise EngineError(f"the workers did not come up:\n{_last_lines(log)}")


def _listening(log: Path) -> str:
    for line in log.read_text(errors="replace").splitlines():
        if "event=listening url=" in line:
            return line.split("event=listening url=")[1].split()[0]
    return ""


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _workers(url: str) -> list[dict[str, Any]]:
    try:
        return list(ask(url, "/midstream/v1/status")["workers"])
    except MidstreamError:
        return []


def _show(url: str, engine: str, console: Console) -> Result:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": TOKENS_MAX,
        "temperature": 0.7,
        "seed": 11,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    console.print(f"[bold]{PROMPT}[/bold]  [dim]({engine}; asked twice, the first answer is not shown)[/dim]\n")
    undisturbed = deque(read_stream(f"{url}{CHAT}", body, ANSWER_TIMEOUT_S), maxlen=1).pop()
    killed, shown = "", 0
    answer = Answer()
    for answer in read_stream(f"{url}{CHAT}", body, ANSWER_TIMEOUT_S):
        console.print(answer.text[shown:], end="", style="green" if killed else "", markup=False, highlight=False)
        shown = len(answer.text)
        if not killed and len(answer.token_ids) >= CUT_AT_TOKEN:
            killed = _kill_serving(url)
            console.print(f"[bold red] <SIGKILL at token {len(answer.token_ids)}: {killed}> [/bold red]", end="")
    console.print("\n")
    session = ask(url, "/midstream/v1/sessions")["sessions"][-1]
    return _compare(engine, undisturbed, answer, session["outcomes"], killed)


def _kill_serving(url: str) -> str:
    """SIGKILL all processes of the worker that has the session; says which."""
    serving = next(w for w in _workers(url) if w["sessions"])
    root = psutil.Process(serving["pid"])
    processes = [*root.children(recursive=True), root]
    for process in processes:
        process.kill()
    return f"{serving['name']} ({len(processes)} processes)"


def _compare(engine: str, undisturbed: Answer, answer: Answer, outcomes: list[dict[str, Any]], killed: str) -> Result:
    lost, duplicated = lost_and_duplicated(undisturbed.token_ids, answer.token_ids)
    last = outcomes[-1] if outcomes else {}
    return Result(
        engine=engine,
        tokens=len(answer.token_ids),
        cut=int(last.get("cut", 0)),
        lag=int(last.get("lag", 0)),
        outcome=str(last.get("outcome", "undisturbed")),
        tier=str(last.get("tier", "")),
        identical=answer.is_same(undisturbed),
        lost=lost,
        duplicated=duplicated,
        gap_ms=answer.gap_ms,
        kv_tokens_loaded=int(last.get("kv_tokens_loaded", 0)),
        tokens_recomputed=int(last.get("tokens_recomputed", 0)),
        killed=killed,
    )


def _table(result: Result) -> Table:
    table = Table(title="What became of the answer", show_header=False)
    rows = {
        "engine": result.engine,
        "killed": result.killed,
        "tokens": str(result.tokens),
        "cut at output token": str(result.cut),
        "lag (tokens regenerated)": str(result.lag),
        "outcome": f"{result.outcome} ({result.tier})",
        "longest gap seen by the client": f"{result.gap_ms:g} ms",
        "KV positions loaded": str(result.kv_tokens_loaded),
        "positions recomputed": str(result.tokens_recomputed),
        "lost / duplicated tokens": f"{result.lost} / {result.duplicated}",
        "identical to the undisturbed answer": "yes" if result.identical else "NO",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
