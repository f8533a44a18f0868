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
