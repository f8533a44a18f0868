"""`midstream verify` as users run it: on a real engine, with real kills, and with faults that it has to find."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from midstream.loadtest.harness import SidecarProcess, Victim, kill_worker
from midstream.session.ports import free_port
from midstream.session.ticket import TICKET, claimed_epoch, worker_dir
from midstream.sidecar.plugin_path import engine_environ

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

# Long enough that even this fast engine is cut where it is meant to be.
LENGTH = 200
PROMPTS = [
    {"name": "greedy", "prompt": "Once upon a time", "temperature": 0, "max_tokens": LENGTH},
    {
        "name": "seeded chat",
        "messages": [{"role": "user", "content": "My name is Ada 🎉"}],
        "temperature": 0.8,
        "seed": 7,
        "frequency_penalty": 0.6,
        "max_tokens": LENGTH,
    },
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, PROMPTS)))
    return file


def verify(*words: str, limit_s: float = 360.0) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "midstream.sidecar.cli", "verify", *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit_s)


def told(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.stdout, done.stderr
    body = json.loads(done.stdout)
    assert isinstance(body, dict)
    return body


def test_every_interrupted_answer_is_identical_every_planted_fault_is_found_and_the_record_holds(
    command: list[str], prompts: Path, tmp_path: Path
) -> None:
    record, page = tmp_path / "record.json", tmp_path / "page.html"
    words = ["--prompts", str(prompts), "--kills", "0.2", "--json", "--record", str(record), "--html", str(page)]
    done = verify(*words, "--", *command)
    body = told(done)
    assert done.returncode == 0, (done.stderr[-3000:], [run for run in body["runs"] if run["verdict"] != "identical"])
    assert (body["cases"], body["identical"], body["restore_differences"], body["variance"]) == (8, 8, 0, 0)
    assert body["mismatches_planted_found"] == 3
    assert {plant["fault"] for plant in body["plants"]} == {"flipped-bit", "shifted-cut", "dropped-penalties"}
    assert set(body["recovery_ms"]) == {"kill", "move", "disk"}
    # An answer that was over before its KV was copied has its ending from the journal.
    assert {"held", "disk"} <= {run["tier"] for run in body["runs"]} <= {"held", "disk", "journal"}
    assert body["kills"] == 2
    assert all(run["killed"] for run in body["runs"] if run["way"] == "kill")
    assert json.loads(record.read_text()) == body
    assert "Exact: every interrupted answer was the undisturbed one (8 of 8)" in page.read_text()

    same = verify("--json", "--check", str(record), "--", *command)
    assert (same.returncode, told(same)) == (0, {"holds": True, "proven": True, "changed": {}})
    threads = [word if command[i - 1] != "--threads" else "2" for i, word in enumerate(command)]
    other = verify("--json", "--check", str(record), "--", *threads)
    assert (other.returncode, list(told(other)["changed"])) == (1, ["threads"])


def test_a_sidecar_that_may_not_use_kv_passes_nothing(command: list[str], prompts: Path) -> None:
    words = ["--prompts", str(prompts), "--cuts", "2", "--ways", "move", "--no-plants", "--json"]
    done = verify(*words, "--set", "restore.tiers=none", "--", *command)
    body = told(done)
    assert (done.returncode, body["recomputed"], body["identical"]) == (4, 4, 0), done.stderr[-3000:]


def test_what_samples_without_a_seed_is_unsettled_and_says_what_to_set(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "Once upon a time", "temperature": 1, "max_tokens": LENGTH}))
    words = ["--prompts", str(file), "--cuts", "2", "--ways", "move", "--no-plants", "--json"]
    done = verify(*words, "--", *command)
    body = told(done)
    assert (done.returncode, body["unsettled"], body["identical"]) == (4, 2, 0), done.stderr[-3000:]
    assert any("seed" in text for text in body["advice"])


def test_a_verification_that_is_ended_leaves_nothing_behind(command: list[str], prompts: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "midstream.sidecar.cli", "verify", "--prompts", str(prompts), "--", *command]
    with (tmp_path / "verify.log").open("wb") as sink:
        running = subprocess.Popen(argv, stdout=sink, stderr=sink)
    seen: set[psutil.Process] = set()

    def engines_run() -> bool:
        assert running.poll() is None, (tmp_path / "verify.log").read_text()
        seen.update(psutil.Process(running.pid).children(recursive=True))
        return sum("midstream.adapters.transformers.server" in " ".join(_words(p)) for p in seen) >= 2

    _wait(engines_run)
    running.terminate()
    assert running.wait(150) == 130
    assert [_words(process) for process in seen if _words(process)] == []


def _words(process: psutil.Process) -> list[str]:
    """Its command line; none when it is over."""
    try:
        return [] if process.status() == psutil.STATUS_ZOMBIE else process.cmdline()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture
def running(command: list[str], tmp_path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Two engines that were started by hand beside a sidecar that is gone again: their folder, and where they are."""
    folder = Path(f"/dev/shm/midstream-test-{os.getpid()}-{time.monotonic_ns()}")
    ports = {name: free_port() for name in ("a", "b")}
    beside = [f"{name}=http://127.0.0.1:{port}" for name, port in ports.items()]
    beside_them = SidecarProcess([], beside=beside, state_dir=folder)  # for its holder, which outlives sidecars
    engines, servings = [], []
    try:
        argv = [sys.executable, "-m", "midstream.sidecar.cli", "serve", "--port", "0", "--state-dir", str(folder)]
        argv += [word for worker in beside for word in ("--worker", worker)]
        with (tmp_path / "serve.log").open("wb") as sink:
            servings.append(serving := subprocess.Popen(argv, stdout=sink, stderr=sink))
        for name, port in ports.items():
            _wait(lambda name=name: (worker_dir(folder, name) / TICKET).exists())
            environ = {**os.environ, "MIDSTREAM_STATE_DIR": str(folder), "MIDSTREAM_WORKER": name}
            with (tmp_path / f"{name}.log").open("wb") as sink:
                engines.append(
                    subprocess.Popen(
                        [*command, "--port", str(port)],
                        env=engine_environ(tmp_path / "plugin", environ),
                        stdout=sink,
                        stderr=sink,
                    )
                )
        for name in ports:
            _wait(lambda name=name: claimed_epoch(worker_dir(folder, name)) is not None)
        serving.terminate()
        serving.wait(60)
        yield folder, beside
    finally:
        for process in servings:
            process.kill()
            process.wait(10)
        for engine in engines:
            if engine.poll() is None:
                kill_worker(engine.pid, Victim.TREE)
            engine.wait(20)
        beside_them.kill_holder()
        beside_them.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_engines_that_others_started_are_verified_where_they_are(
    running: tuple[Path, list[str]], prompts: Path
) -> None:
    folder, beside = running
    workers = [word for worker in beside for word in ("--worker", worker)]
    words = ["--prompts", str(prompts), "--cuts", "2", "--json", "--state-dir", str(folder), *workers]
    done = verify(*words)
    body = told(done)
    assert done.returncode == 0, (done.stderr[-3000:], [run for run in body["runs"] if run["verdict"] != "identical"])
    assert (body["cases"], body["identical"], body["kills"], body["mismatches_planted_found"]) == (4, 4, 0, 3)


def _wait(condition: Any, limit_s: float = 90.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come up"
        time.sleep(0.05)
