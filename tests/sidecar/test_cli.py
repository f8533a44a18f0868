"""The command line: what it prints, what it hands on, how it ends."""

import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import midstream.sidecar
from midstream.session.disk_store import DiskStore
from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest
from midstream.sidecar import cli, environments
from midstream.sidecar.cli import Exit
from midstream.sidecar.config import Settings
from support.fake_sidecar import FakeSidecar

SESSION = SessionId("ab" * 16)


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["midstream", *words])
    return cli.main()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MIDSTREAM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, list[str] | None]]:
    """What the daemon was started with."""
    calls: list[tuple[Settings, list[str] | None]] = []
    daemon = types.ModuleType("midstream.sidecar.daemon")

    def run(settings: Settings, command: list[str] | None) -> int:
        calls.append((settings, command))
        return 7

    daemon.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "midstream.sidecar.daemon", daemon)
    monkeypatch.setattr(midstream.sidecar, "daemon", daemon, raising=False)
    return calls


Started = list[tuple[Settings, list[str] | None]]


def test_run_hands_on_everything_after_the_dashes_as_it_is(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    engine = [sys.executable, "-m", "midstream.adapters.transformers.server", "--model", "M", "--port", "9", "--json"]
    assert call(monkeypatch, "run", "--workers", "2", "--port", "0", "--", *engine) == 7
    settings, command = started[0]
    assert command == engine
    assert settings.engine.worker_count == 2
    assert settings.listen.port == 0


def test_run_takes_the_engine_s_options_without_dashes_too(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    engine = [sys.executable, "-m", "midstream.adapters.transformers.server", "--port", "9"]
    assert call(monkeypatch, "run", *engine) == 7
    assert started[0][1] == engine


def test_a_command_that_is_no_engine_is_wrong_usage_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "run", "--state-dir", str(tmp_path / "state"), "--", "ls") == Exit.USAGE
    assert "'ls' is no engine that midstream knows how to start; use `vllm serve" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_demo_says_how_its_engine_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def demo_engine(engine: str, report: object) -> tuple[list[str], dict[str, str]]:
        return [f"/my cache/{engine}", "serve", "M"], {"VLLM_CPU_KVCACHE_SPACE": "1"}

    monkeypatch.setattr(environments, "demo_engine", demo_engine)
    assert call(monkeypatch, "demo", "--engine", "vllm", "--command") == 0
    line = capsys.readouterr().out
    assert line == "env VLLM_CPU_KVCACHE_SPACE=1 '/my cache/vllm' serve M\n"
    assert shlex.split(line)[2:] == ["/my cache/vllm", "serve", "M"]
    assert call(monkeypatch, "demo", "--command", "--json") == 0
    assert json.loads(capsys.readouterr().out)["argv"] == ["/my cache/transformers", "serve", "M"]


def test_a_command_that_does_not_exist_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "run", "--", "no-such-engine", "serve") == Exit.USAGE
    assert "no-such-engine: no such command on the path" in capsys.readouterr().err
    assert started == []


def test_serve_takes_workers_with_and_without_names(monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    assert call(monkeypatch, "serve", "--worker", "a=http://x:1", "--worker", "http://y:2/") == 7
    settings, command = started[0]
    assert command is None
    assert [(w.name, w.url) for w in settings.workers] == [("a", "http://x:1"), ("worker-2", "http://y:2")]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve"], "no worker is named"),
        (["serve", "--worker", "ftp://x"], "--worker: workers: worker 'worker-1'"),
        (["serve", "--worker", "http://x", "--port", "99999"], "--port: listen.port: expected int in 0..65535"),
        (["serve", "--worker", "http://x", "--set", "proxy.x=1"], "--set proxy.x: unknown setting"),
        (["serve", "--worker", "http://x", "--set", "log.level=loud"], '--set log.level: expected "debug"'),
        (["config", "--config", "/no/such.yaml"], "/no/such.yaml: cannot be read"),
        (["demo", "--engine", "gpt"], "--engine: expected"),
        (["snapshots", "list"], "no store is set"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, started: Started, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert call(monkeypatch, *words) == Exit.USAGE
    assert told in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize("words", [["no-such"], ["serve", "--no-such"], ["run"], ["serve", "--port", "x"]])
def test_a_wrong_flag_or_command_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert call(monkeypatch, *words) == Exit.USAGE
    assert capsys.readouterr().err.startswith("midstream: ")


def test_config_prints_each_setting_and_where_it_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MIDSTREAM_ARENA_SLOT_COUNT", "9")
    assert call(monkeypatch, "config", "--json", "--port", "1", "--set", "log.level=debug") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["arena.slot_count"] == {"value": 9, "from": "MIDSTREAM_ARENA_SLOT_COUNT"}
    assert found["listen.port"] == {"value": 1, "from": "--port"}
    assert found["log.level"] == {"value": "debug", "from": "--set log.level"}
    assert found["store.dir"] == {"value": None, "from": "default"}
    long = "/dev/shm/" + "folder/" * 30
    monkeypatch.setenv("MIDSTREAM_STATE_DIR", long)
    monkeypatch.setenv("COLUMNS", "80")
    assert call(monkeypatch, "config") == 0
    text = capsys.readouterr().out
    assert "MIDSTREAM_ARENA_SLOT_COUNT" in text
    assert long.rstrip("/") in text


STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "workers": [
        {
            "name": "w-1",
            "url": "http://x:1",
            "state": "ready",
            "epoch": 2,
            "pid": 5,
            "sessions": 3,
            "new": [1],
            "gone": 0,
        }
    ],
    "holder": {"pools": 2},
    "mover": None,
}
SESSIONS: dict[str, Any] = {
    "sessions": [
        {
            "session": SESSION,
            "worker": "w-1",
            "generation": 2,
            "state": "decoding",
            "obstacle": "beam_search",
            "outcomes": [
                {"reason": "process_death", "outcome": "exact", "tier": "held", "cut": 20, "lag": 0, "gap_ms": 181.25}
            ],
        }
    ]
}


def test_status_and_sessions_show_what_the_sidecar_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with FakeSidecar({"/midstream/v1/status": STATUS, "/midstream/v1/sessions": SESSIONS}) as fake:
        assert call(monkeypatch, "status", "--url", fake.url) == 0
        text = capsys.readouterr().out
        assert all(word in text for word in ("w-1", "ready", "pools: 2", "version: 0.1.0", "new: 1"))
        assert "none:" not in text
        assert call(monkeypatch, "status", "--all", "--url", fake.url) == 0
        assert "none: gone" in capsys.readouterr().out
        monkeypatch.setenv("COLUMNS", "60")  # a pipe is as wide as what is in it: ids can be searched for
        assert call(monkeypatch, "sessions", "--url", fake.url) == 0
        text = capsys.readouterr().out
        assert f"{SESSION}  process_death: exact from held, cut 20, lag 0, gap 181 ms" in text
        assert SESSION in text
        assert "beam_search" in text
        assert call(monkeypatch, "status", "--json", "--url", fake.url) == 0
        assert json.loads(capsys.readouterr().out) == STATUS
        monkeypatch.setenv("MIDSTREAM_LISTEN_PORT", str(fake.port))
        # A folder in which no sidecar has said where it listens, whatever runs on this machine.
        monkeypatch.setenv("MIDSTREAM_STATE_DIR", str(tmp_path))
        assert call(monkeypatch, "sessions", "--json") == 0
        assert json.loads(capsys.readouterr().out) == SESSIONS


def test_a_sidecar_that_does_not_run_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "status", "--url", "http://127.0.0.1:9") == Exit.UNAVAILABLE
    assert "is it running? Name it with --url" in capsys.readouterr().err


@pytest.mark.parametrize("answer", [b"[1]", b"\x80\x04pickle", b""])
def test_something_else_that_answers_is_not_taken_for_a_sidecar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: bytes
) -> None:
    with FakeSidecar({"/midstream/v1/status": answer}) as fake:
        assert call(monkeypatch, "status", "--url", fake.url) == Exit.UNAVAILABLE
    assert "--url" in capsys.readouterr().err


def stored(folder: Path, block: bytes = b"k" * 64) -> Path:
    """A store with one snapshot of two blocks."""
    store = DiskStore(folder)
    with store.begin() as draft:
        chunks = (draft.put_chunk(block), draft.put_chunk(block[::-1] + b"" if len(set(block)) > 1 else b"v" * 64))
        draft.publish(
            Manifest(SESSION, 1, {"engine": "vllm"}, "0" * 32, 16, 64, 20, "1" * 32, 22, (5, 6, 7), chunks, 1.5)
        )
    store.close()
    return folder


def test_snapshots_are_listed_shown_and_verified(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(stored(tmp_path / "store"))
    assert call(monkeypatch, "snapshots", "list", "--store-dir", folder, "--json") == 0
    [row] = json.loads(capsys.readouterr().out)["snapshots"]
    assert (row["session"], row["kv_len"], row["latest"]) == (SESSION, 22, True)
    assert call(monkeypatch, "snapshots", "show", SESSION, "--store-dir", folder, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["outputs"], shown["key"]) == ([5, 6, 7], {"engine": "vllm"})
    assert call(monkeypatch, "snapshots", "show", SESSION, "--store-dir", folder) == 0
    assert "3 tokens" in capsys.readouterr().out
    assert call(monkeypatch, "snapshots", "list", "--store-dir", folder) == 0
    assert "1970-01-01 00:00:01" in capsys.readouterr().out
    assert call(monkeypatch, "snapshots", "verify", "--store-dir", folder, "--json") == 0
    verified = json.loads(capsys.readouterr().out)
    assert verified["ok"] is True
    assert verified["snapshots"][0]["raw_bytes"] == 128


def test_damage_is_found_by_verify_and_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = stored(tmp_path / "store")
    [chunk, *_] = sorted((folder / "chunks").glob("*/*"))
    damaged = bytearray(chunk.read_bytes())
    damaged[-1] ^= 1
    chunk.write_bytes(damaged)
    assert call(monkeypatch, "snapshots", "verify", "--store-dir", str(folder), "--json") == Exit.NEGATIVE
    found = json.loads(capsys.readouterr().out)
    assert chunk.name in found["snapshots"][0]["damage"][0]
    assert chunk.read_bytes() == damaged
    chunk.unlink()
    assert call(monkeypatch, "snapshots", "verify", SESSION, "--store-dir", str(folder)) == Exit.NEGATIVE


def test_a_torn_manifest_is_found_by_verify(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = stored(tmp_path / "store")
    [manifest] = (folder / "sessions" / SESSION).iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-5])
    assert call(monkeypatch, "snapshots", "verify", "--store-dir", str(folder), "--json") == Exit.NEGATIVE
    assert json.loads(capsys.readouterr().out)["damaged_manifests"] >= 1


def test_a_folder_that_is_no_store_and_a_session_that_is_none_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, "snapshots", "list", "--store-dir", str(tmp_path)) == Exit.UNAVAILABLE
    assert "is not a store" in capsys.readouterr().err
    folder = str(stored(tmp_path / "store"))
    assert call(monkeypatch, "snapshots", "show", "xyz", "--store-dir", folder) == Exit.USAGE
    assert "expected 32 lower-case hex digits" in capsys.readouterr().err
    assert call(monkeypatch, "snapshots", "show", "0" * 32, "--store-dir", folder) == Exit.UNAVAILABLE


def test_doctor_ends_with_1_when_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state = str(tmp_path / "state")
    common = ["--port", "0", "--state-dir", state, "--json"]
    assert call(monkeypatch, "doctor", *common) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert call(monkeypatch, "doctor", "--worker", "http://127.0.0.1:9", *common) == Exit.NEGATIVE
    failed = [c for c in json.loads(capsys.readouterr().out)["checks"] if c["verdict"] == "fail"]
    assert [c["name"] for c in failed] == ["worker worker-1"]
    assert call(monkeypatch, "doctor", "--port", "0", "--state-dir", state) == 0
    assert "ok   kernel: Linux" in capsys.readouterr().out


def test_the_version_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("midstream 0.")
    assert call(monkeypatch, "version", "--json") == 0
    assert json.loads(capsys.readouterr().out)["midstream"].startswith("0.")


def test_help_names_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['midstream', '--help']; from midstream.sidecar.cli import main; code = main();"
        "print([m for m in ('aiohttp', 'uvloop', 'prometheus_client', 'zstandard') if m in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("run", "serve", "demo", "status", "sessions", "doctor", "snapshots", "config", "version"):
        assert f"\n  {command} " in done.stdout
    assert done.stdout.strip().endswith("[] 0")


def test_without_the_sidecar_s_libraries_the_remedy_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "LIBRARIES", ("json", "no_such_library"))
    assert call(monkeypatch, "status") == Exit.USAGE
    assert capsys.readouterr().err == (
        "midstream: no_such_library not installed; the command needs the sidecar's libraries: "
        'in its checkout, pip install ".[sidecar]"\n'
    )
