"""`midstream loadtest` as users run it: on the embedded engine, with real faults, judged by what it writes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.sidecars import Sidecar

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LIMIT_S = 540.0


def loadtest(out: Path, *options: str, command: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """The exit status and the summary."""
    argv = [sys.executable, "-m", "midstream.sidecar.cli", "loadtest", "--out", str(out), "--json", *options]
    done = subprocess.run(
        [*argv, *(["--", *command] if command else [])], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_strategies_side_by_side_tell_what_each_kill_cost(command: list[str], tmp_path: Path) -> None:
    status, told = loadtest(
        tmp_path / "out", "--concurrency", "4", "--requests", "4", "--prompt-tokens", "uniform:80-160",
        "--output-tokens", "120", "--kills", "1", "--kill-every", "1", "--strategy", "kv,recompute,restart,engine",
        "--set", "proxy.stall_floor_s=5", "--seed", "2", command=command,
    )  # fmt: skip
    assert status == 0, told
    sides = told["strategies"]
    assert list(sides) == ["engine", "control", "kv", "recompute", "restart"]
    for name, side in sides.items():
        assert side["failed"] == side["lost"] == side["repeated"] == side["violations"] == 0, (name, side)
        assert side["completed"] >= 4
        assert side["total_output_tokens"] == 120 * side["completed"]
    for name in ("kv", "recompute", "restart"):
        assert sides[name]["faults"] == 1, sides[name]
        assert sides[name]["interrupted"] >= 1
        assert sides[name]["gaps"] >= 1
        assert sides[name]["p50_gap_ms"] > 0
        assert "sidecar" in sides[name]["processes"]
    # All of kv's own answers are those of nobody being killed, and the sidecar says how they got there.
    assert sides["kv"]["identical"] == sides["kv"]["interrupted"]
    assert set(sides["kv"]["outcomes"]) == {"exact"}
    assert set(sides["recompute"]["outcomes"]) == {"recomputed"}
    assert sides["restart"]["outcomes"] == {}, "the sidecar took up what was to be the client's business"
    assert told["comparison"]["p50_gap_restart_over_kv"] > 1

    faults = lines(tmp_path / "out" / "faults.jsonl")
    assert [f["strategy"] for f in faults if f["hit"]] == ["kv", "recompute", "restart"]
    assert len({(f["kind"], f["planned_s"]) for f in faults}) == 1, "the same plan for all"
    assert all(f["decoding"] >= 1 and f["processes"] for f in faults if f["hit"])
    requests = lines(tmp_path / "out" / "requests.jsonl")
    hit = [r for r in requests if r["strategy"] == "kv" and r["interruptions"]]
    assert {r["session"] for r in hit} <= set(faults[0]["sessions"])
    assert all(r["reasons"] and r["tiers"] and r["gaps_ms"] for r in hit)
    asked = {(r["strategy"], r["index"]): r["input_len"] for r in requests}
    assert all(asked[("kv", r["index"])] == r["input_len"] for r in requests), "the same requests for all"


def test_a_plan_of_all_other_faults_is_carried_out_and_loses_nothing(command: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "faults.yaml"
    plan.write_text(
        """
        faults:
          - {at_s: 0.5, kind: net-cut, for_s: 1}
          - {at_s: 2.0, kind: net-slow, for_s: 1.5, delay_s: 0.05}
          - {at_s: 4.0, kind: stop, for_s: 8}
          - {at_s: 8.0, kind: term}
          - {at_s: 14.0, kind: kill-worker}
        """
    )
    status, told = loadtest(
        tmp_path / "out", "--rate", "2", "--requests", "8", "--prompt-tokens", "40", "--output-tokens", "120",
        "--faults", str(plan), "--set", "proxy.stall_floor_s=2", "--silence", "120",
        # A new request is refused where no worker is left, and on a busy machine one takes its time to come back.
        "--workers", "3", command=command,
    )  # fmt: skip
    kv = told["strategies"]["kv"]
    assert status == 0, (kv, lines(tmp_path / "out" / "faults.jsonl"))
    assert (kv["faults"], kv["faults_missed"], kv["lost"], kv["repeated"], kv["failed"]) == (5, 0, 0, 0, 0)
    assert kv["interruptions"] >= 3
    assert {f["kind"] for f in lines(tmp_path / "out" / "faults.jsonl")} == {
        "net-cut", "net-slow", "stop", "term", "kill-worker",
    }  # fmt: skip
    assert kv["max_lateness_ms"] < 5000


def test_a_full_arena_shows_in_the_outcomes_and_not_in_the_answers(command: list[str], tmp_path: Path) -> None:
    plan = tmp_path / "faults.yaml"
    plan.write_text("arena: {slot_count: 1, page_count: 16}\nfaults: [{at_s: 0.5, kind: kill-tree}]\n")
    _, told = loadtest(
        tmp_path / "out", "--concurrency", "6", "--requests", "6", "--prompt-tokens", "40", "--output-tokens", "150",
        "--faults", str(plan), command=command,
    )  # fmt: skip
    kv = told["strategies"]["kv"]
    assert (kv["lost"], kv["repeated"], kv["failed"]) == (0, 0, 0), kv
    assert kv["outcomes"].get("recomputed", 0) + kv["outcomes"].get("restarted", 0) >= 1, kv["outcomes"]
    [entry] = lines(tmp_path / "out" / "faults.jsonl")
    assert entry["arena_full"] >= 1


def test_a_running_sidecar_is_measured_and_left_as_it_was(kept: Callable[[], Sidecar], tmp_path: Path) -> None:
    sidecar = kept()
    status, told = loadtest(
        tmp_path / "out", "--url", sidecar.url, "--rate", "10", "--arrivals", "constant", "--requests", "8",
        "--output-tokens", "20",
    )  # fmt: skip
    assert status == 0
    assert told["strategies"]["url"]["completed"] == 8
    assert told["strategies"]["url"]["interrupted"] == 0
    assert sidecar.process.process is not None
    assert sidecar.process.process.poll() is None


async def test_a_run_that_is_interrupted_leaves_no_process_and_keeps_what_is_through(
    command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "midstream.sidecar.cli", "loadtest", "--out", str(out), "--requests", "4"]
    options = ["--output-tokens", "2000", "--strategy", "kv,engine", "--workers", "1", "--concurrency", "4"]
    environ = {**os.environ, "MIDSTREAM_TEST_MARK": str(tmp_path)}
    running = await asyncio.create_subprocess_exec(*argv, *options, "--", *command, env=environ, stderr=subprocess.PIPE)
    assert running.stderr is not None
    while True:
        line = await asyncio.wait_for(running.stderr.readline(), 240)
        assert line, "it ended by itself"
        if b"control: starting" in line:
            break
    running.send_signal(signal.SIGTERM)
    await asyncio.wait_for(running.communicate(), 200)
    assert running.returncode == 130
    assert json.loads((out / "summary.json").read_text())["complete"] is False
    assert _left(f"MIDSTREAM_TEST_MARK={tmp_path}") == []


def _left(mark: str) -> list[str]:
    """Processes that carry a mark in their environment."""
    return [path.name for path in Path("/proc").glob("[0-9]*") if _carries(path, mark)]


def _carries(process: Path, mark: str) -> bool:
    try:
        return mark.encode() in (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
