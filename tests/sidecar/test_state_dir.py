"""One folder, one owner: whoever or whatever is in the way is named."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from midstream.session.errors import ConfigError
from midstream.sidecar.state_dir import owned_state_dir


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with owned_state_dir(tmp_path / "a" / "state") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert (path / "sidecar.lock").stat().st_mode & 0o777 == 0o600


def test_two_sidecars_never_work_in_one_folder(tmp_path: Path) -> None:
    with (
        owned_state_dir(tmp_path / "state") as path,
        pytest.raises(ConfigError, match="another sidecar works there; stop it"),
        owned_state_dir(path),
    ):
        pytest.fail("both are in")


def test_a_sidecar_that_was_killed_leaves_the_folder_free(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from midstream.sidecar.state_dir import owned_state_dir\n"
        "with owned_state_dir(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path / "state")]).returncode == -9
    with owned_state_dir(tmp_path / "state"):
        pass


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), owned_state_dir(tmp_path / "state"):
        raise KeyError
    with owned_state_dir(tmp_path / "state"):
        pass


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    state.chmod(0o750)
    with pytest.raises(ConfigError, match="others may enter it; run chmod 700"), owned_state_dir(state):
        pytest.fail("it was entered")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=f"belongs to user {owner}"), owned_state_dir(state):
        pytest.fail("it was entered")


def test_a_file_in_its_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigError, match=r"state_dir .*state: "), owned_state_dir(tmp_path / "state"):
        pytest.fail("it was entered")


def test_a_folder_in_the_locks_place_is_an_error(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / "sidecar.lock").mkdir()
    with pytest.raises(ConfigError, match="choose a folder that you may write to"), owned_state_dir(state):
        pytest.fail("it was entered")
