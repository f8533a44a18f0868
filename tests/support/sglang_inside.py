"""Programs in SGLang's own Python, without a server: one interpreter imports it, and each program runs in a fork of it.

Owns that interpreter, which ends with the tests' process. A program sees what it would see in a new interpreter, but
for modules that are imported already; what it changes in them goes with it.
"""

import atexit
import functools
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path

from midstream.sidecar import plugin_path
from midstream.sidecar.environments import SGLANG_ENVIRON
from support.sglang_rig import sglang_python

LIMIT_S = 170
_FIRST = """
import json
import os
import sys
import traceback
import sglang.srt.entrypoints.openai.serving_completions
import sglang.srt.managers.scheduler

for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        ended = 1
        try:
            os.chdir(asked["folder"])
            told = os.open("told", os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(told, 1), os.dup2(told, 2)
            exec(compile(asked["program"], "program", "exec"), {"__name__": "__main__"})
            ended = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(ended)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def run_inside(program: str, folder: Path) -> None:
    """Run a program in a folder of its own, and fail with what it says."""
    interpreter = _interpreter()
    assert interpreter.stdin is not None
    assert interpreter.stdout is not None
    interpreter.stdin.write(json.dumps({"program": program, "folder": str(folder)}) + "\n")
    interpreter.stdin.flush()
    answered, _, _ = select.select([interpreter.stdout], [], [], LIMIT_S)
    ended = interpreter.stdout.readline().strip() if answered else "no end in time"
    told = folder / "told"
    assert ended == "0", (ended, told.read_text()[-4000:] if told.exists() else "")


@functools.cache
def _interpreter() -> "subprocess.Popen[str]":
    python = sglang_python()
    folder = tempfile.TemporaryDirectory(prefix="midstream-test-inside-")
    environ = {**os.environ, **SGLANG_ENVIRON, "PYTHONPATH": str(plugin_path.ensure(Path(folder.name)))}
    process = subprocess.Popen(
        [python, "-c", _FIRST], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def end() -> None:
        process.kill()
        process.wait(10)
        folder.cleanup()

    atexit.register(end)
    return process
