"""A real etcd for the tests of fleets: the machine's own, else the one that its Debian or Ubuntu has as a package.

Owns where it comes from. Nothing is installed: the package is unpacked into the folder that it is asked for, and lists
of packages, if the machine has none yet, are kept in that folder too, so no rights are needed.
"""

import shutil
from pathlib import Path

from ..session.errors import EngineError
from .environment_build import Report, built_once, run

PACKAGE = "etcd-server"
_REMEDY = "or install etcd 3.4 or newer, so that `etcd` is on the path"


def etcd(place: Path, report: Report) -> Path:
    """The path of an etcd. EngineError when there is none and none can be had."""
    found = shutil.which("etcd")
    if found is not None:
        return Path(found).absolute()
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise EngineError(f"etcd: there is none on the path, and no {tool} to get one; install etcd 3.4 or newer")

    def build(folder: Path) -> None:
        try:
            _download(folder, [], report)
        except EngineError:
            report("etcd: no package in this machine's lists; reading lists of its sources")
            options = _own_lists(folder)
            run(["apt-get", *options, "update"], report, what="etcd", remedy=f"look at the lines above, {_REMEDY}")
            _download(folder, options, report)
        package = next(folder.glob(f"{PACKAGE}_*.deb"), None)
        if package is None:
            raise EngineError(f"etcd: apt-get fetched no package {PACKAGE}; {_REMEDY.removeprefix('or ')}")
        run(["dpkg-deb", "-x", str(package), str(folder / "root")], report, what="etcd")
        run([str(_binary(folder)), "--version"], report, what="etcd", remedy=_REMEDY)
        package.unlink()
        shutil.rmtree(folder / "apt", ignore_errors=True)

    return _binary(built_once(place, build, report))


def _binary(folder: Path) -> Path:
    return folder / "root" / "usr" / "bin" / "etcd"


def _download(folder: Path, options: list[str], report: Report) -> None:
    command = ["env", "-C", str(folder), "apt-get", *options, "download", PACKAGE]
    run(command, report, what="etcd", remedy=f"look at the lines above, {_REMEDY}")


def _own_lists(folder: Path) -> list[str]:
    lists, cache = folder / "apt" / "lists", folder / "apt" / "cache"
    for made in (lists / "partial", cache / "archives" / "partial"):
        made.mkdir(parents=True)
    return ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}", "-o", "Debug::NoLocking=1"]
