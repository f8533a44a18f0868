"""Settings: precedence, ranges, and errors that name the place."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from midstream.session.errors import ConfigError
from midstream.sidecar.config import WorkerUrl, description, expected, leaves, require_workers
from midstream.sidecar.config_load import assignment, flag, load, values, variable


def write(folder: Path, text: str) -> Path:
    file = folder / "midstream.yaml"
    file.write_text(text)
    return file


def error_of(folder: Path, text: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(environ=environ or {}, file=write(folder, text))
    return str(caught.value)


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = write(tmp_path, "listen: {port: 1, host: h}\nproxy: {keepalive_s: 2}\narena: {slot_count: 7}\n")
    environ = {"MIDSTREAM_LISTEN_PORT": "3", "MIDSTREAM_PROXY_KEEPALIVE_S": "4"}
    loaded = load([flag("listen.port", 5, "--port")], environ, file)
    assert loaded.settings.listen.port == 5
    assert loaded.settings.proxy.keepalive_s == 4.0
    assert loaded.settings.arena.slot_count == 7
    assert loaded.settings.store.dir is None
    assert loaded.places["listen.port"] == "--port"
    assert loaded.places["proxy.keepalive_s"] == "MIDSTREAM_PROXY_KEEPALIVE_S"
    assert loaded.places["listen.host"] == "midstream.yaml"
    assert loaded.places["store.dir"] == "default"


def test_a_wrong_value_is_named_with_its_place_and_what_was_expected(tmp_path: Path) -> None:
    text = error_of(tmp_path, "proxy: {keepalive_s: soon}")
    assert text == 'midstream.yaml: proxy.keepalive_s: expected float > 0 and <= 3600, got "soon"'


def test_a_wrong_key_is_named_with_the_nearest_that_exists(tmp_path: Path) -> None:
    assert error_of(tmp_path, "proxy: {keepalives: 1}") == (
        "midstream.yaml: proxy.keepalives: unknown setting; did you mean proxy.keepalive_s?"
    )
    assert "did you mean listen.port?" in error_of(tmp_path, "port: 80")
    assert "`midstream config` lists all" in error_of(tmp_path, "zzzz: 1")


def test_a_wrong_variable_is_named_by_its_own_name(tmp_path: Path) -> None:
    text = error_of(tmp_path, "", {"MIDSTREAM_ARENA_SLOT_COUNT": "many", "MIDSTREAM_LISTEN_PROT": "1"})
    assert 'MIDSTREAM_ARENA_SLOT_COUNT: expected int in 1..65536, got "many"' in text
    assert "MIDSTREAM_LISTEN_PROT: unknown setting; did you mean MIDSTREAM_LISTEN_PORT?" in text


def test_a_wrong_flag_is_named_by_its_own_name() -> None:
    with pytest.raises(ConfigError, match=r"^--port: listen\.port: expected int in 0\.\.65535, got 70000$"):
        load([flag("listen.port", 70_000, "--port")], {})
    with pytest.raises(ConfigError, match=r"^--set proxy\.x: unknown setting"):
        assignment("proxy.x=1")
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        assignment("proxy.keepalive_s")


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    text = error_of(tmp_path, "listen: {port: -1}\nlog: {format: xml}\n", {"MIDSTREAM_LOG_LEVEL": "loud"})
    assert text.splitlines() == [
        "midstream.yaml: listen.port: expected int in 0..65535, got -1",
        'midstream.yaml: log.format: expected "text" or "json", got "xml"',
        'MIDSTREAM_LOG_LEVEL: expected "debug" or "info" or "warning" or "error", got "loud"',
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "proxy: {keepalive_s: 1}\nproxy: {keepalive_s: 2}",
            "midstream.yaml:2: not valid YAML ('proxy' is given twice)",
        ),
        ("a: [", "midstream.yaml:1: not valid YAML"),
        ("- a", "expected groups of settings, got a list of 1"),
        ("proxy: &a [*a]", "proxy: expected a group of settings, got a list of 1"),
        ("log: {level: {a: 1}}", "got a group of 1"),
        ("listen: {host: null}", "expected text, got null"),
        ("log: {level: true}", "got true"),
        ("proxy: 5", "midstream.yaml: proxy: expected a group of settings, got 5"),
        ("proxy: {assign_seed: 1}", "expected true or false, got 1"),
        ("arena: {slot_count: 1.5}", "expected int in 1..65536, got 1.5"),
        ("proxy: {keepalive_s: .nan}", "proxy.keepalive_s: expected float"),
        ("proxy: {keepalive_s: .inf}", "proxy.keepalive_s: expected float"),
        ("? [a]\n: 1", "a key must be a word"),
        ("state_dir: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("workers: [{name: a}]", "workers: worker 1: url: expected text, it is missing"),
        ("workers: [{name: a, ulr: b}]", 'workers: worker 1: unknown key "ulr"; did you mean url?'),
        ("workers: ['http://x', {name: a, zz: b}]", 'worker 2: unknown key "zz"; a worker has name and url'),
        ("workers: [{name: 5, url: b}]", "workers: worker 1: name: expected text, got 5"),
        ("workers: [[a]]", "workers: worker 1: expected {name, url}, got a list of 1"),
        ("workers: {a: b}", "workers: expected a list of {name, url}"),
        ("workers: [ftp://x]", "expected a URL like http://host:8000, got 'ftp://x'"),
        ("workers: [http://x:99999]", "expected a URL like"),
        ("workers: ['a/b=http://x:1']", "worker name 'a/b'"),
        ("workers: [a=http://x:1, a=http://y:1]", "'a' is named twice"),
    ],
)
def test_bad_files_get_a_clear_error(tmp_path: Path, text: str, told: str) -> None:
    assert told in error_of(tmp_path, text)


def test_bytes_that_are_no_text_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_bytes(b"a: \xc3\x28")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(environ={}, file=file)
    file.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load(environ={}, file=file)
    with pytest.raises(ConfigError, match="No such file"):
        load(environ={"MIDSTREAM_CONFIG": str(tmp_path / "none.yaml")})


def test_an_empty_file_and_an_empty_group_change_nothing(tmp_path: Path) -> None:
    assert load(environ={}, file=write(tmp_path, "# nothing\n")).settings == load(environ={}).settings
    assert load(environ={}, file=write(tmp_path, "proxy:\n")).settings == load(environ={}).settings


def test_variables_that_kubernetes_makes_are_not_taken_for_settings() -> None:
    environ = {
        "MIDSTREAM_PORT": "tcp://10.0.0.1:8800",
        "MIDSTREAM_SERVICE_HOST": "10.0.0.1",
        "MIDSTREAM_PORT_8800_TCP_ADDR": "10.0.0.1",
        "MIDSTREAM_TEST_TINY_MODEL": "x",
        "MIDSTREAM_WORKER": "what an engine's plugin is told",
    }
    assert set(load(environ=environ).places.values()) == {"default"}


def test_workers_come_as_text_or_as_a_list(tmp_path: Path) -> None:
    both = (WorkerUrl(name="a", url="http://x:1"), WorkerUrl(name="worker-2", url="http://y:2/v1?a=b"[:10]))
    assert load(environ={"MIDSTREAM_WORKERS": "a=http://x:1, http://y:2/"}).settings.workers == both
    file = write(tmp_path, "workers:\n  - {name: a, url: 'http://x:1'}\n  - http://y:2\n")
    assert load(environ={}, file=file).settings.workers == both
    with pytest.raises(ConfigError, match="no worker is named"):
        require_workers(load(environ={}).settings)


def test_the_state_folder_is_made_absolute() -> None:
    settings = load([flag("state_dir", "x", "--state-dir")], {}).settings
    assert settings.state_dir == str(Path.cwd() / "x")


@given(st.sampled_from(sorted(set(leaves()) - {"workers", "state_dir"})), st.text(max_size=20))
def test_any_text_is_either_taken_or_a_config_error_that_names_the_variable(key: str, text: str) -> None:
    told = ""
    try:
        loaded = load(environ={variable(key): text})
    except ConfigError as error:
        told = str(error)
    else:
        assert loaded.places[key] == variable(key)
    assert not told or told.startswith(f"{variable(key)}: expected ")


LINES = st.lists(
    st.one_of(
        st.text("abc:-[]{}&*!|>\"'#?,% \t\n0.", max_size=12),
        st.sampled_from(
            ["proxy:", "  keepalive_s: ", "workers:", "- http://x:1", "listen: {port: ", "}", "&a", "*a", "? "]
        ),
    ),
    max_size=12,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES)
def test_any_file_is_either_taken_or_a_config_error_that_names_it(tmp_path: Path, lines: list[str]) -> None:
    file = write(tmp_path, "\n".join(lines))
    told = "midstream.yaml"
    try:
        load(environ={}, file=file)
    except ConfigError as error:
        told = str(error)
    assert told.startswith("midstream.yaml")


def test_a_small_file_that_would_fill_the_memory_is_refused_quickly(tmp_path: Path) -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    assert "a11: unknown setting" in error_of(tmp_path, text + "proxy: *a11\n")


def test_what_is_printed_can_be_read_back(tmp_path: Path) -> None:
    settings = load(environ={}).settings
    lines = [f"{variable(k)}" for k in values(settings)]
    environ = {name: str(v) for name, v in zip(lines, values(settings).values(), strict=True) if v != ()}
    environ = {k: {"True": "true", "None": "null"}.get(v, v) for k, v in environ.items()}
    assert load(environ=environ).settings == settings


def test_every_setting_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for key, kind in leaves().items():
        row = f"| `{key}` | {expected(kind)} |"
        assert row in page, f"docs/configuration.md lacks the row {row}"
        assert description(kind) in page
