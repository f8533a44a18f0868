"""What the contract gives every adapter: environments, flags, keys and marked bodies."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.adapters.contract import Beside, flag_value, set_flag
from midstream.adapters.registry import ADAPTERS
from midstream.session.errors import EngineError
from midstream.session.ids import SessionId
from midstream.session.key import REQUIRED
from midstream.session.marker import FIELD, NAME, KvSource, Marker, Resume

S = SessionId("5" * 32)
KEY = {name: f"a {name}" for name in REQUIRED}
words = st.sampled_from(["serve", "m", "--port", "--port=1", "8000", "--portal", "--host", "--x=--port", ""])


def beside(**changes: Any) -> Beside:
    known: dict[str, Any] = {
        "worker": "w0",
        "epoch": 3,
        "holder": Path("/state/holder.sock"),
        "arena": Path("/state/3.arena"),
        "adopt": Path("/state/2.arena"),
        "load_timeout_s": 10.0,
        "plugin_dir": Path("/state/plugin"),
    }
    return Beside(**{**known, **changes})


def test_an_engine_is_told_its_place() -> None:
    assert beside().environment({"PATH": "/bin"}) == {
        "PATH": "/bin",
        "MIDSTREAM_WORKER": "w0",
        "MIDSTREAM_EPOCH": "3",
        "MIDSTREAM_HOLDER": "/state/holder.sock",
        "MIDSTREAM_ARENA": "/state/3.arena",
        "MIDSTREAM_ADOPT": "/state/2.arena",
        "MIDSTREAM_LOAD_TIMEOUT_S": "10",
        "PYTHONPATH": "/state/plugin",
    }


def test_what_an_outer_engine_was_told_is_not_passed_on() -> None:
    outer = {"MIDSTREAM_ARENA": "/outer", "MIDSTREAM_ADOPT": "/outer", "MIDSTREAM_WORKER": "outer"}
    told = beside(arena=None, adopt=None).environment(outer)
    assert "MIDSTREAM_ARENA" not in told
    assert "MIDSTREAM_ADOPT" not in told
    assert told["MIDSTREAM_WORKER"] == "w0"
    assert outer["MIDSTREAM_WORKER"] == "outer"


def test_a_python_path_is_kept_behind_the_plugins() -> None:
    assert beside().environment({"PYTHONPATH": "/mine:/yours"})["PYTHONPATH"] == "/state/plugin:/mine:/yours"
    assert beside().environment({"PYTHONPATH": ""})["PYTHONPATH"] == "/state/plugin"


@given(st.lists(words, max_size=6))
def test_a_flag_that_was_set_is_there_once_and_all_other_words_stay(argv: list[str]) -> None:
    command = set_flag(argv, "--port", "9")
    assert flag_value(command, "--port") == "9"
    assert command[-2:] == ["--port", "9"]
    assert set_flag(command, "--port", "9") == command
    assert [w for w in command if w in ("serve", "m", "--portal", "--host", "--x=--port")] == [
        w
        for i, w in enumerate(argv)
        if w in ("serve", "m", "--portal", "--host", "--x=--port") and not _is_value(argv, i)
    ]


def _is_value(argv: list[str], index: int) -> bool:
    """Whether the word at `index` is the value of a --port before it."""
    skip = False
    for at, word in enumerate(argv):
        if skip:
            skip = False
            if at == index:
                return True
        elif word == "--port":
            skip = True
    return False


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (["--port", "1"], "1"),
        (["--port=1"], "1"),
        (["--port="], ""),
        (["--port"], None),
        (["--portal", "1"], None),
        ([], None),
        (["--port", "1", "--port", "2"], "1"),
    ],
)
def test_a_flags_value_is_found_however_it_is_given(argv: list[str], value: str | None) -> None:
    assert flag_value(argv, "--port") == value


@pytest.mark.parametrize("name", ADAPTERS)
def test_requests_are_marked_and_a_resume_needs_to_know_where(name: str) -> None:
    adapter = ADAPTERS[name]
    body = {"prompt": "x", FIELD: {NAME: "forged"}}
    first, later = Marker(S, 1), Marker(S, 2, Resume((1, 2), KvSource.HELD, "0" * 32))
    assert adapter.submit(body, first) == {"prompt": "x", FIELD: {NAME: first.to_json()}}
    assert adapter.resume(body, later)[FIELD] == {NAME: later.to_json()}
    with pytest.raises(EngineError, match="nothing says where it goes on"):
        adapter.resume(body, first)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_key_that_is_incomplete_is_an_error_that_names_engine_and_field(name: str) -> None:
    adapter = ADAPTERS[name]
    assert adapter.key({"key": KEY}).to_json() == KEY
    with pytest.raises(EngineError, match=f"{name}: key: model missing"):
        adapter.key({"key": {**KEY, "model": ""}})
    with pytest.raises(EngineError, match=f"{name}: key: expected an object"):
        adapter.key({})


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_an_adapter_says_it_can_it_has_a_call_for(name: str) -> None:
    adapter = ADAPTERS[name]
    assert adapter.health().path == "/health"
    calls = (adapter.quiesce(), adapter.unquiesce())
    assert all(call is not None for call in calls) == adapter.capabilities.quiesce
    for call in calls:
        if call is not None:
            # The operator's calls are not the clients'.
            assert call.path.partition("?")[0] in adapter.private_paths
