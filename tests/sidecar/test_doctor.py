"""The doctor: each thing that can be wrong is found, and the remedy is named."""

import socket
import sys
from pathlib import Path

import pytest

from midstream.sidecar import doctor_engine, doctor_host
from midstream.sidecar.config import Arena, Listen, Settings, Store, WorkerUrl
from midstream.sidecar.doctor import Check, Verdict, examine
from support.fake_sidecar import FakeSidecar


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=str(tmp_path / "state"), listen=Listen(port=0), arena=Arena(page_count=16))


def verdicts(checks: list[Check]) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in checks}


def test_a_machine_where_all_is_well_fails_in_nothing(settings: Settings, tmp_path: Path) -> None:
    checks = examine(settings.replace(store=Store(dir=str(tmp_path / "store"), bytes_max=1 << 20)))
    assert {c.name for c in checks} >= {"python", "libraries", "kernel", "state_dir", "memory", "open files", "port"}
    assert [c for c in checks if c.verdict is Verdict.FAIL] == []


def test_every_finding_that_is_not_well_names_a_remedy(settings: Settings) -> None:
    checks = examine(settings.replace(workers=(WorkerUrl(name="a", url="http://127.0.0.1:9"),)), "/no/python")
    bad = [c for c in checks if c.verdict is not Verdict.OK]
    assert bad
    assert all(c.remedy for c in bad)


def test_a_state_folder_that_is_open_to_others_fails_with_the_command_that_mends_it(settings: Settings) -> None:
    folder = Path(settings.state_dir)
    folder.mkdir()
    folder.chmod(0o755)
    found = doctor_host.state_dir(settings)
    assert found.verdict is Verdict.FAIL
    assert found.remedy == f"chmod 700 {folder}"
    folder.chmod(0o700)
    assert doctor_host.state_dir(settings).verdict is Verdict.OK


def test_a_state_folder_that_is_a_link_or_a_file_is_not_taken(settings: Settings, tmp_path: Path) -> None:
    Path(settings.state_dir).symlink_to(tmp_path)
    assert doctor_host.state_dir(settings).verdict is Verdict.FAIL
    Path(settings.state_dir).unlink()
    Path(settings.state_dir).write_text("")
    assert doctor_host.state_dir(settings).verdict is Verdict.FAIL


def test_arenas_that_do_not_fit_into_memory_fail(settings: Settings) -> None:
    found = doctor_host.shared_memory(settings.replace(arena=Arena(page_count=1_048_576), workers=_many(1024)))
    assert found.verdict is Verdict.FAIL
    assert "arena.page_count" in found.remedy


def test_a_port_in_use_is_named(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        found = doctor_host.port(settings.replace(listen=Listen(port=number)))
    assert found.verdict is Verdict.WARN
    assert found.fact == f"127.0.0.1:{number} is in use"


def test_an_address_that_is_not_of_this_machine_fails(settings: Settings) -> None:
    assert doctor_host.port(settings.replace(listen=Listen(host="192.0.2.1", port=80))).verdict is Verdict.FAIL


def test_a_store_that_cannot_be_written_fails(settings: Settings) -> None:
    found = doctor_host.store(settings.replace(store=Store(dir="/proc/store")))  # not even root can
    assert found.verdict is Verdict.FAIL
    assert found.fact.startswith("/proc cannot be written")


def test_a_store_with_too_little_room_is_a_warning(settings: Settings, tmp_path: Path) -> None:
    found = doctor_host.store(settings.replace(store=Store(dir=str(tmp_path), bytes_max=1 << 50)))
    assert found.verdict is Verdict.WARN
    assert list(tmp_path.iterdir()) == []


def test_an_interpreter_without_an_engine_finds_the_plugin_all_the_same() -> None:
    found = verdicts(doctor_engine.environment(sys.executable))
    assert found["plugin"] is Verdict.OK
    assert found["plugin installed"] is Verdict.OK
    assert found["engine"] is Verdict.FAIL


def test_an_interpreter_without_midstream_will_do_for_run_and_not_for_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where engines are tested, the plugin's folder is on the path of everything that tests start.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = tmp_path / "python"
    # The interpreter of this environment, but without its site-packages.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    for is_attached, verdict in ((False, Verdict.WARN), (True, Verdict.FAIL)):
        found = {c.name: c for c in doctor_engine.environment(str(python), is_attached=is_attached)}
        assert found["plugin"].verdict is Verdict.OK
        assert "`midstream run`" in found["plugin"].fact
        assert found["plugin installed"].verdict is verdict
        assert "`midstream serve` does" in found["plugin installed"].fact
        assert found["plugin installed"].remedy.endswith(f"{python} -m pip install .")


def test_an_interpreter_that_does_not_start_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no libpython' >&2\nexit 127\n")
    broken.chmod(0o755)
    [found] = doctor_engine.environment(str(broken))
    assert found.verdict is Verdict.FAIL
    assert "no libpython" in found.fact


@pytest.mark.parametrize(("version", "verdict"), [("0.32.0+cpu", Verdict.OK), ("0.99.0", Verdict.WARN)])
def test_a_vllm_that_was_not_tested_is_a_warning(version: str, verdict: Verdict) -> None:
    assert doctor_engine._vllm_version(version).verdict is verdict


def test_the_tested_versions_are_those_of_the_plugin() -> None:
    from midstream.adapters.vllm.plugin import TESTED_VERSIONS

    assert doctor_engine.TESTED_VLLM == TESTED_VERSIONS


def test_what_a_running_sidecar_says_becomes_findings(settings: Settings) -> None:
    status = {
        "version": "0.1.0",
        "holder": {"pools": 2},
        "mover": {"error": "does not answer"},
        "workers": [
            {"name": "a", "state": "ready", "key": {"engine": "vllm"}, "pools": ["a/1/0"]},
            {"name": "unplaced", "state": "ready", "key": {"engine": "vllm"}, "pools": []},
            {"name": "b", "state": "ready", "key": None},
            {"name": "c", "state": "starting", "detail": "its engine loads"},
            {
                "name": "d",
                "state": "dead",
                "detail": "process python: killed",
                "key": {"engine": "vllm"},
                "pools": ["d"],
            },
            {"name": "e", "state": "unreachable", "detail": "http://x does not answer"},
            {"name": "f", "state": "failed", "key": {"engine": "vllm"}},
            {"name": "g", "state": "draining", "key": {"engine": "vllm"}},
        ],
    }
    with FakeSidecar({"/midstream/v1/status": status, "/health": {}}) as fake:
        asked = settings.replace(
            listen=Listen(port=fake.port),
            workers=(WorkerUrl(name="w", url=fake.url), WorkerUrl(name="x", url=fake.url + "/no")),
        )
        checks = doctor_engine.sidecar(asked)
        found = verdicts(checks)
        named = verdicts(doctor_engine.workers(asked))
    assert found == {
        "sidecar": Verdict.OK,
        "holder": Verdict.OK,
        "mover": Verdict.FAIL,
        "worker a": Verdict.OK,
        "worker unplaced": Verdict.WARN,
        "worker b": Verdict.WARN,
        "worker c": Verdict.WARN,
        "worker d": Verdict.FAIL,
        "worker e": Verdict.FAIL,
        "worker f": Verdict.FAIL,
        "worker g": Verdict.WARN,
    }
    facts = {check.name: check.fact for check in checks}
    assert facts["worker d"] == "is dead (process python: killed)"
    assert facts["worker e"] == "nobody is there (http://x does not answer)"
    assert facts["worker c"] == "is starting (its engine loads)"
    assert named == {"worker w": Verdict.OK, "worker x": Verdict.WARN}


def test_a_check_that_breaks_is_a_finding_and_stops_no_other(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def python(settings: Settings) -> Check:
        raise RuntimeError("odd machine")

    monkeypatch.setattr(doctor_host, "CHECKS", (python, doctor_host.port))
    found = {c.name: c for c in examine(settings)}
    assert "odd machine" in found["python"].fact
    assert found["port"].verdict is Verdict.OK


def _many(count: int) -> tuple[WorkerUrl, ...]:
    return tuple(WorkerUrl(name=f"w-{i}", url="http://127.0.0.1:9") for i in range(count))
