"""Mooncake's client and master in an environment of their own: native code of many megabytes, for one kind of store.

Owns what it consists of. The wheel without CUDA: RDMA and TCP are in it all the same. It is linked against libibverbs
and librdmacm. Where the machine has none, those of its Debian or Ubuntu are unpacked beside it, which takes no rights;
lists of packages, if there are none yet, are kept there, too.
"""

import os
import shutil
import subprocess
from pathlib import Path

from ..session.errors import EngineError
from .environment_build import Report, built_once, clean_environ, make_venv, pip, run, site_of

MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
PACKAGES = ("libnl-3-200", "libnl-route-3-200", "libibverbs1", "librdmacm1", "libnuma1")
# In the order in which they need each other.
LIBRARIES = ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
_IMPORT = "import mooncake.store"
_REMEDY = "install libibverbs1 and librdmacm1 (apt-get install libibverbs1 librdmacm1), and try again"
# Loaded by their full names, so that whoever asks for them by their short ones has them already.
_PRELOAD = """import ctypes
for _path in {paths!r}:
    ctypes.CDLL(_path, ctypes.RTLD_GLOBAL)
"""
_MASTER = """#!/bin/sh
LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "{master}" "$@"
"""


def mooncake_python(place: Path, report: Report) -> Path:
    """The interpreter of that environment; `mooncake_master` lies beside it. EngineError when it cannot be built."""

    def build(folder: Path) -> None:
        python = make_venv(folder, report)
        # What the wheel asks for beside itself is for its own servers, which nobody here starts.
        pip(python, ["install", "--no-deps", MOONCAKE], report, what="mooncake")
        libraries = [] if _loads(python) else _unpacked(folder, report)
        if libraries:
            site = site_of(python)
            (site / "mooncake_libraries.py").write_text(_PRELOAD.format(paths=[str(path) for path in libraries]))
            (site / "mooncake_libraries.pth").write_text("import mooncake_libraries\n")
        run([str(python), "-c", _IMPORT], report, what="mooncake", remedy=_REMEDY)
        [master] = folder.glob("lib/python3*/site-packages/mooncake/mooncake_master")
        beside = folder / "bin" / "mooncake_master"
        # The wheel's own is a script that imports what was left out.
        beside.unlink(missing_ok=True)
        folders = ":".join(sorted({str(path.parent) for path in libraries}))
        beside.write_text(_MASTER.format(libraries=folders or folder / "lib", master=master))
        beside.chmod(0o755)
        if not os.access(master, os.X_OK):
            master.chmod(0o755)

    return built_once(place, build, report) / "bin" / "python"


def _loads(python: Path) -> bool:
    done = subprocess.run(
        [str(python), "-c", _IMPORT],
        env=clean_environ(os.environ, keep_path=False),
        capture_output=True,
        timeout=120,
        check=False,
    )
    return done.returncode == 0


def _unpacked(folder: Path, report: Report) -> list[Path]:
    """The libraries, out of those packages."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise EngineError(f"mooncake: no libibverbs, and no {tool} to get it; {_REMEDY}")
    packages = folder / "packages"
    packages.mkdir()
    try:
        _download(packages, [], report)
    except EngineError:
        report("mooncake: no packages in this machine's lists; reading lists of its sources")
        lists, cache = packages / "lists", packages / "cache"
        for made in (lists / "partial", cache / "archives" / "partial"):
            made.mkdir(parents=True)
        own = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}", "-o", "Debug::NoLocking=1"]
        run(["apt-get", *own, "update"], report, what="mooncake", remedy=_REMEDY)
        _download(packages, own, report)
    for package in packages.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(folder / "root")], report, what="mooncake")
    shutil.rmtree(packages)
    found = [path for name in LIBRARIES for path in sorted((folder / "root").rglob(name))[:1]]
    if len(found) < len(LIBRARIES):
        raise EngineError(f"mooncake: {len(found)} of {len(LIBRARIES)} libraries were in the packages; {_REMEDY}")
    return found


def _download(packages: Path, options: list[str], report: Report) -> None:
    command = ["env", "-C", str(packages), "apt-get", *options, "download", *PACKAGES]
    run(command, report, what="mooncake", remedy=_REMEDY)
