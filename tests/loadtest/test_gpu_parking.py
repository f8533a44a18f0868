"""How the steps of parking are run where there is no GPU: each apart, ended at its deadline, never missing silently."""

import io
import json
import sys
import time
from pathlib import Path

import pytest

from midstream.loadtest.gpu import park_steps, parking
from midstream.loadtest.gpu.clock import Clock
from midstream.loadtest.gpu.parking import BARS, Step
from midstream.loadtest.gpu.results import Results


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "figures.jsonl", io.StringIO())


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Steps are this script."""
    (tmp_path / "a_step.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(park_steps, "__name__", "a_step")


def test_a_step_s_figures_get_their_bars_by_the_beginning_of_their_names(
    tmp_path: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [
        {"name": "losses that differ after a park", "value": 0, "unit": "steps", "steps": 3},
        {"name": "a full GPU is refused, and the process is intact", "value": 0},
        {"name": "out: 8 GiB", "value": 2.1, "unit": "GB/s"},
    ]
    script(tmp_path, monkeypatch, f"for told in {told!r}: import json; print('figure', json.dumps(told))")
    parking._run(tmp_path / "out", Step(("x",), 20), "x", results)
    assert [(f.name[:6], f.met) for f in results.figures] == [("losses", True), ("a full", False), ("out: 8", None)]
    assert results.figures[0].more == {"steps": 3}


def test_a_step_that_hangs_is_ended_with_all_that_it_started_and_what_it_said_counts(
    tmp_path: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    script(
        tmp_path,
        monkeypatch,
        "import json, subprocess, sys, time\n"
        f"popen = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child)!r}, 'w').write(str(popen.pid))\n"
        "print('figure', json.dumps({'name': 'in: first', 'value': 1}), flush=True)\n"
        "time.sleep(60)\n",
    )
    began_s = time.monotonic()
    parking._run(tmp_path / "out", Step(("x",), 1.5), "x y", results)
    assert time.monotonic() - began_s < 10
    assert [(f.name, f.value) for f in results.figures] == [("in: first", 1), ("x y", None)]
    assert "longer than" in results.figures[1].more["why"]
    state = Path(f"/proc/{child.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"


def test_a_step_that_breaks_is_a_figure_that_is_missing_with_its_last_line(
    tmp_path: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, monkeypatch, "raise SystemExit('no GPU here')")
    parking._run(tmp_path / "out", Step(("x",), 20), "x", results)
    [figure] = results.figures
    assert (figure.value, figure.more["why"]) == (None, "no GPU here")


async def test_what_does_not_fit_into_the_time_is_said(tmp_path: Path, results: Results) -> None:
    await parking.measure(None, tmp_path, results, Clock(1.0), words="train,full")
    assert [f.name for f in results.figures] == ["train 150", "full"]
    assert all("of the time were left" in f.more["why"] for f in results.figures)


def test_every_bar_is_of_a_figure_that_some_step_tells() -> None:
    source = Path(str(park_steps.__file__)).read_text() + Path(str(parking.__file__)).read_text()
    for start in BARS:
        wanted = start if start not in ("helper killed", "both killed") else "{who} killed"
        assert f'"{wanted}' in source, start
    words = [step.words[0] for step in (*parking.BESIDE, *parking.ALONE)]
    assert set(words) == set(park_steps.STEPS)
    assert json.dumps(BARS)
