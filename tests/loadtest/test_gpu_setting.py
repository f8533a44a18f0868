"""What a measurement on a GPU is set up from: the import folder, models and commands, engines, questions, kills."""

import asyncio
import importlib.metadata
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import psutil
import pytest

from midstream.adapters.registry import adapter_for
from midstream.adapters.vllm.adapter import KV_TRANSFER_CONFIG
from midstream.loadtest.client import HALF_A_CHARACTER, Answer
from midstream.loadtest.gpu import __main__ as command
from midstream.loadtest.gpu import copying, exact, fault
from midstream.loadtest.gpu.engines import Engine, lives
from midstream.loadtest.gpu.fleet import kill_core
from midstream.loadtest.gpu.kinds import CONNECTOR, KINDS, SGLANG, EngineKind, with_options
from midstream.loadtest.gpu.models import LARGE, write_large
from midstream.loadtest.gpu.place import ROOT, place
from midstream.loadtest.gpu.results import Figure, Results
from midstream.loadtest.gpu.streams import Load
from midstream.session.errors import ConfigError, EngineError

# A front end that answers /health, and a core beside it that is known by its title.
STANDS_IN = """
import http.server, subprocess, sys
core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "EngineCore"])
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()
"""


def test_the_folder_makes_midstream_importable_with_its_plugin_and_its_command(tmp_path: Path) -> None:
    for _ in range(2):  # it may be there already
        lines = place(ROOT, tmp_path / "place")
    code = (
        "import importlib.metadata as m, midstream.session, midstream.loadtest.gpu.models;"
        "print(m.version('midstream'), [e.value for e in m.entry_points(group='vllm.general_plugins')])"
    )
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    script = "; ".join([*lines, f'"{sys._base_executable}" -S -c "{code}"'])  # type: ignore[attr-defined]
    done = subprocess.run(["bash", "-c", script], env=environ, cwd="/", capture_output=True, text=True, check=False)
    version = importlib.metadata.version("midstream")
    assert done.stdout.strip() == f"{version} ['midstream.adapters.vllm.plugin:register']", done.stderr
    told = subprocess.run(
        [str(tmp_path / "place" / "bin" / "midstream"), "--help"],
        env={**environ, "PYTHONPATH": str(tmp_path / "place")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "loadtest" in told.stdout, told.stderr
    assert "from vllm.entrypoints.cli.main import main" in (tmp_path / "place" / "bin" / "vllm").read_text()


def test_the_connector_is_the_one_that_midstream_sets_itself() -> None:
    assert CONNECTOR == KV_TRANSFER_CONFIG


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_both_commands_are_the_engine_s_for_midstream(tmp_path: Path, kind: EngineKind) -> None:
    for options in (kind.large(30 << 30), kind.small(), (*kind.small(), *kind.exact_options)):
        argv = kind.serve(tmp_path, *options)
        assert adapter_for(argv).name == kind.name
        assert str(tmp_path) in argv


def test_sglang_beside_a_sidecar_is_tried_on_a_gpu_and_one_alone_is_not_told_anything(tmp_path: Path) -> None:
    beside = Engine("a", ["x"], tmp_path, state_dir=tmp_path, kind=SGLANG)
    alone = Engine("alone", ["x"], tmp_path, kind=SGLANG)
    assert beside._environ["SGLANG_MIDSTREAM_TRIED"] == "device"
    assert not [name for name in alone._environ if "MIDSTREAM_" in name]
    argv = SGLANG.serve(tmp_path, *SGLANG.small())
    # What `midstream run` would add.
    assert "--page-size" in argv
    assert with_options(SGLANG, ()) is SGLANG
    told = with_options(SGLANG, ["--disable-overlap-schedule"])
    assert told.small()[-1] == told.large(1 << 30)[-1] == "--disable-overlap-schedule"


def test_sglang_is_asked_for_nothing_that_it_refuses() -> None:
    asked = {q.name: q.body for q in exact.questions(3, 100, SGLANG)}
    assert asked.keys() == {q.name for q in exact.questions(3, 100)}
    assert not any("min_p" in body or "structured_outputs" in body for body in asked.values())
    assert "regex" in asked["grammar"]


def test_the_large_model_has_the_shape_of_an_8b_llama_and_the_small_one_s_tokenizer(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        write_large(small, tmp_path / "large")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        (small / name).write_text(name)
    large = write_large(small, tmp_path / "large")
    assert sorted(path.name for path in large.iterdir()) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    config = json.loads((large / "config.json").read_text())
    assert config["hidden_size"] == config["num_attention_heads"] * config["head_dim"]
    assert LARGE.token_bytes == 131_072
    with pytest.raises(ConfigError, match="no model folder"):
        write_large(tmp_path / "nowhere", tmp_path / "other")


def test_equal_seeds_make_equal_prompts_and_others_do_not() -> None:
    one, same, other = Load(3, 50, 9, "x").asks(), Load(3, 50, 9, "x").asks(), Load(3, 50, 9, "y").asks()
    assert one == same
    assert len({tuple(ask.body["prompt"]) for ask in (*one, *other)}) == 6
    assert all(len(ask.body["prompt"]) == 50 and ask.output_tokens == ask.body["max_tokens"] == 9 for ask in one)


def test_tables_have_each_block_once_and_the_layout_is_that_of_the_large_model() -> None:
    found = copying.tables(4, "seed")
    blocks = [block for table in found for block in table]
    assert sorted(blocks) == list(range(4 * copying.SESSION_BLOCKS))
    assert blocks != sorted(blocks)
    layout = copying.layout_of(1000)
    assert layout.block_bytes == copying.BLOCK_TOKENS * LARGE.token_bytes
    assert layout.end == 1000 * layout.block_bytes


def test_two_engines_in_turn_get_every_kind_of_question() -> None:
    asked = exact.questions(3, 100)
    kinds = {question.name for question in asked}
    for engine in (0, 1):
        assert {question.name for question in asked[engine::2]} == kinds
    before = exact.questions(2, 100)
    assert not [q for q in asked if q in before]


def answer(*ids: int, done: bool = True) -> Answer:
    """An answer of these tokens."""
    return Answer(token_ids=list(ids), finish="length" if done else "", done=done)


def test_an_answer_is_judged_by_undisturbed_ones_that_agree() -> None:
    same = [answer(1, 2), answer(1, 2)]
    assert exact.judge(same, answer(1, 2)) == "identical"
    assert exact.judge(same, answer(1, 3)) == "different"
    assert exact.judge([answer(1, 2), answer(1, 3)], answer(1, 3)) == "variance"
    assert exact.judge(same, answer(1, done=False)) == "broken"
    half = answer(1, 2)
    half.violations.append(HALF_A_CHARACTER)
    assert exact.judge([half, half], half) == "identical"
    half.violations.append("a second role")
    assert exact.judge([half, half], half) == "broken"


def takeover(outcome: str, detail: str = "") -> dict[str, object]:
    """One of a session, as the sidecar tells it."""
    return {"outcome": outcome, "tier": "held", "detail": detail, "lag": 1, "cut": 40}


def verdict(got: Answer, *outcomes: dict[str, object]) -> exact.Verdict | None:
    return exact.verdict_of("greedy", exact.Kind.KILL, [answer(1, 2), answer(1, 2)], got, outcomes)


def test_an_answer_that_was_lost_before_its_session_had_a_name_is_broken() -> None:
    refused = Answer(status=503, error={"status": 503, "body": "no worker"})
    found = verdict(refused)
    assert found is not None
    assert (found.verdict, found.outcome) == ("broken", "none")
    assert "503" in found.detail
    found = verdict(Answer(violations=["the connection broke: ServerDisconnectedError()"]))
    assert found is not None
    assert found.verdict == "broken"
    assert "the connection broke" in found.detail
    assert verdict(answer(1, done=False)) is not None
    # It ran on the engine that lives.
    assert verdict(answer(1, 2)) is None


@pytest.mark.parametrize(
    ("outcomes", "wanted"),
    [
        (["exact"], "exact"),
        (["exact", "exact"], "exact"),
        (["interrupted", "exact"], "exact"),
        (["exact", "interrupted"], "exact"),
        (["recomputed", "exact"], "recomputed"),
        (["exact", "recomputed", "interrupted"], "recomputed"),
        (["interrupted"], "interrupted"),
    ],
)
def test_a_takeover_that_was_not_exact_counts_whichever_came_last(outcomes: list[str], wanted: str) -> None:
    found = verdict(answer(1, 2), *(takeover(outcome, outcome) for outcome in outcomes))
    assert found is not None
    assert (found.verdict, found.outcome, found.detail) == ("identical", wanted, wanted)


def told_of(found: Sequence[exact.Verdict], ran: Sequence[exact.Kind], folder: Path) -> list[Figure]:
    results = Results(folder / "figures.jsonl", io.StringIO())
    exact.tell(found, ran, results)
    return results.figures


def test_what_is_not_identical_and_exact_each_time_does_not_meet_the_bar(tmp_path: Path) -> None:
    good, bad = (
        verdict(answer(1, 2), takeover("exact")),
        verdict(answer(1, 2), takeover("recomputed"), takeover("exact")),
    )
    lost = verdict(Answer(status=503, error={"status": 503}))
    assert good is not None
    assert bad is not None
    assert lost is not None
    kinds = [exact.Kind.KILL, exact.Kind.KILL]
    assert [figure.met for figure in told_of([good, good], kinds, tmp_path)] == [True]
    for other in (bad, lost):
        [figure] = told_of([good, other], kinds, tmp_path)
        assert (figure.value, figure.bar, figure.met) == (1, 2, False)


def test_a_kind_of_loss_that_interrupted_nobody_is_said_to_be_missing(tmp_path: Path) -> None:
    good = verdict(answer(1, 2), takeover("exact"))
    assert good is not None
    kill, disk = told_of([good], [exact.Kind.KILL, exact.Kind.DISK], tmp_path)
    assert (kill.name, kill.met) == ("kill: identical", True)
    assert (disk.name, disk.value, disk.more["why"]) == ("disk: identical", None, "no session was interrupted")
    [nothing] = told_of([], [], tmp_path)
    assert (nothing.value, nothing.more["why"]) == (None, "no engine was lost")


def test_time_is_kept_for_a_restart_and_not_for_a_cold_start() -> None:
    assert exact.kept_free_s([130.0]) == 65.0 + exact.KILL_S
    assert exact.kept_free_s([130.0, 50.0]) == 50.0 + exact.KILL_S
    # Also where it takes longer than was thought, and the longest one counts.
    assert exact.kept_free_s([60.0, 66.0, 50.0]) == 66.0 + exact.KILL_S


def test_the_fault_is_found_as_a_plugin_and_does_nothing_unless_it_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault.dist_info(tmp_path)
    found = {
        point.group: point.load()
        for distribution in importlib.metadata.distributions(path=[str(tmp_path)])
        for point in distribution.entry_points
    }
    assert found == {"vllm.general_plugins": fault.arm, "sglang.srt.plugins": fault.arm}
    monkeypatch.delenv(fault.VARIABLE, raising=False)
    threads = len(psutil.Process().threads())
    fault.arm()
    assert len(psutil.Process().threads()) == threads


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        [],
        ["gap", "--scenes", "kv:many"],
        ["exact", "--kills", "by-lightning"],
        ["overhead", "--rounds", "0"],
        ["copy", "--copy-sessions", "1000"],
        ["probe", "--limit", "-1"],
        ["gap", "--engine", "sglang"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_a_part_that_there_is_no_time_for_is_said_to_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    assert command.main(["overhead", "--limit", "5", "--out", str(tmp_path), "--home", str(tmp_path)]) == 1
    [told] = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert told["value"] is None
    assert "left" in told["why"]
    assert "missing" in capsys.readouterr().out


@pytest.fixture
def handlers() -> Iterator[None]:
    """Signals are this process's own again afterwards."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_part_that_breaks_in_any_way_is_said_to_be_missing_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    begun = []

    def breaking(part: str, *_: object) -> None:
        begun.append(part)
        raise aiohttp.ServerDisconnectedError

    monkeypatch.setattr(command, "_run", breaking)
    assert command.main(["copy", "probe", "--out", str(tmp_path), "--home", str(tmp_path)]) == 2
    assert begun == ["copy", "probe"]
    assert "ServerDisconnectedError: Server disconnected" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_background_job_ends_in_good_order_when_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None, number: signal.Signals
) -> None:
    monkeypatch.setattr(command, "_run", lambda *_: signal.raise_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert command.main(["copy", "probe", "--out", str(tmp_path), "--home", str(tmp_path)]) == 2


async def test_an_engine_is_waited_for_its_core_is_found_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    engine = Engine("a", [sys.executable, "-c", STANDS_IN], tmp_path)
    async with aiohttp.ClientSession() as http:
        try:
            engine.start()
            assert await engine.wait_ready(http, timeout_s=30) == engine.ready_after_s
            core = kill_core(engine)
            async with asyncio.timeout(10):
                while lives(core):  # noqa: ASYNC110 - it is no child of this process
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineError, match="has no core"):
                engine.core()
            engine.stop()
            engine.start()
            await engine.wait_ready(http, timeout_s=30)
            again = engine.core()
        finally:
            engine.stop()
        assert not lives(again)


async def test_an_engine_that_ends_shows_the_end_of_its_log(tmp_path: Path) -> None:
    engine = Engine("a", [sys.executable, "-c", "print('no room on this card')"], tmp_path)
    async with aiohttp.ClientSession() as http:
        engine.start()
        try:
            with pytest.raises(EngineError, match="no room on this card"):
                await engine.wait_ready(http, timeout_s=30)
        finally:
            engine.stop()


async def test_an_engine_beside_a_sidecar_is_told_its_place_and_one_alone_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIDSTREAM_HOLDER", "/somebody/elses")
    says = "import os, sys; print(sorted(k for k in os.environ if k.startswith('MIDSTREAM_')), sys.argv[1:])"
    for name, state_dir in (("alone", None), ("beside", tmp_path / "state")):
        engine = Engine(name, [sys.executable, "-c", says], tmp_path, state_dir=state_dir)
        engine.start()
        await engine.ended()
        told = engine.last_lines()
        assert ("MIDSTREAM_STATE_DIR" in told, "--kv-transfer-config" in told) == (bool(state_dir), bool(state_dir))
        assert "MIDSTREAM_HOLDER" not in told
        assert f"'--port', '{engine.port}'" in told
