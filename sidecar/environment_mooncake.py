"""Mooncake's client and master in an environment of their own: native code of many megabytes, for one kind of store.

Owns what it consists of. The wheel without CUDA: RDMA and TCP are in it all the same. It is linked against libibverbs
and librdmacm, which are the machine's own.
"""

import os
from pathlib import Path

from ..session.errors import EngineError
from .environment_build import Report, built_once, make_venv, pip, run

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
_IMPORT = "import mooncake.store, pathlib; print(pathlib.Path(mooncake.store.__file__).with_name('mooncake_master'))"
_REMEDY = "install libibverbs1 and librdmacm1 (apt-get install libibverbs1 librdmacm1), and try again"


def mooncake_python(place: Path, report: Report) -> Path:
    """The interpreter of that environment; `mooncake_master` lies beside it. EngineError when it cannot be built."""

    def build(folder: Path) -> None:
        python = make_venv(folder, report)
        # What the wheel asks for beside itself is for its own servers, which nobody here starts.
        pip(python, ["install", "--no-deps", MOONCAKE], report, what="mooncake")
        run([str(python), "-c", _IMPORT], report, what="mooncake", remedy=_REMEDY)
        [master] = folder.glob("lib/python3*/site-packages/mooncake/mooncake_master")
        if not os.access(master, os.X_OK):
            raise EngineError(f"{master} cannot be run; {_REMEDY}")
        beside = folder / "bin" / "mooncake_master"
        # The wheel's own is a script that imports what was left out.
        beside.unlink(missing_ok=True)
        beside.symlink_to(master)

    return built_once(place, build, report) / "bin" / "python"
