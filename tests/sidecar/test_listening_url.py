"""A sidecar says where it listens, and the commands that ask it find it there; its output ends with it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from midstream.session.ticket import TICKET, claim_ticket, worker_dir
from midstream.sidecar.cli_inspect import sidecar_url
from midstream.sidecar.config import Listen, Settings
from midstream.sidecar.state_dir import listening_url, reachable_url, told_url

CLI = (sys.executable, "-m", "midstream.sidecar.cli")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("fd00::1", "http://[fd00::1]:80"),
        ("gpu-7", "http://gpu-7:80"),
    ],
)
def test_what_listens_on_a_host_can_be_asked_from_here(host: str, url: str) -> None:
    assert reachable_url(host, 80) == url


def test_a_sidecar_is_found_where_it_said_and_else_where_it_is_to_listen(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path), listen=Listen(port=8800))
    with told_url(tmp_path, "http://127.0.0.1:4711"):
        assert sidecar_url(settings) == "http://127.0.0.1:4711"
    assert sidecar_url(settings) == "http://127.0.0.1:8800"
    assert list(tmp_path.iterdir()) == []


def test_what_another_user_says_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with told_url(tmp_path, "http://127.0.0.1:4711"):
        monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
        assert listening_url(tmp_path) is None


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    with told_url(tmp_path / "gone", "http://127.0.0.1:4711"):
        assert listening_url(tmp_path / "gone") is None


def test_status_finds_a_sidecar_on_any_port_and_its_output_ends_with_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    options = ("--state-dir", str(state))
    serving = [*CLI, "serve", "--worker", "a=http://127.0.0.1:9", "--port", "0", *options]
    sidecar = subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + 30
        while listening_url(state) is None and time.monotonic() < deadline_s:
            time.sleep(0.05)
        asked = subprocess.run([*CLI, "status", "--json", *options], capture_output=True, text=True, timeout=30)
        told = json.loads(asked.stdout)
        assert told["state_dir"] == str(state)
        # An engine that has taken its place may yet bring a pool, so that the holder stays.
        while not (worker_dir(state, "a") / TICKET).exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        claim_ticket(worker_dir(state, "a"))
    finally:
        sidecar.send_signal(signal.SIGTERM)
        # The holder lives on, and must not keep the pipe open.
        written, _ = sidecar.communicate(timeout=30)
        os.kill(told["holder"]["pid"], signal.SIGKILL)
    assert b"event=stopping" in written
    assert listening_url(state) is None
