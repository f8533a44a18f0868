"""What all tests load before they run, on whatever machine: nothing that only some of them have."""

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).with_name("conftest.py")
LOADING = """
import runpy, sys
sys.modules["xdist"] = None
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[2])
"""


def test_where_tests_are_not_shared_out_between_processes_nothing_for_that_is_needed() -> None:
    command = [sys.executable, "-c", LOADING, str(CONFTEST.parent), str(CONFTEST)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Tasks that failed, in circles of garbage: they tell of it when they are collected, and parse what they were doing.
PARSING = """
import ast, asyncio, gc, inspect, pathlib, sys
sys.path.insert(0, sys.argv[1])
from support.parsing import parsed

async def fails():
    known = {}
    return known["a"] + known["b"]

async def leave():
    task = asyncio.ensure_future(fails())
    circle = {"task": task}
    circle["circle"] = circle
    await asyncio.sleep(0)

gc.disable()
loop = asyncio.new_event_loop()
for _ in range(9):
    loop.run_until_complete(leave())
    loop.run_until_complete(asyncio.sleep(0))
gc.enable()
gc.set_threshold(1000)
parsed(pathlib.Path(ast.__file__))
gc.collect()
"""


def test_what_is_collected_does_not_break_a_parsing(tmp_path: Path) -> None:
    script = tmp_path / "parsing.py"
    script.write_text(PARSING)
    command = [sys.executable, str(script), str(CONFTEST.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Task exception was never retrieved" in done.stderr
