"""Builds what is costly once, in a cache folder that many runs share.

Owns the lock, the stamp and the calls of pip. Invariant: a folder that carries its stamp is complete; one that does not
is removed and built anew; of several who want the same, one builds and the others wait. Virtual environments cannot be
moved, so they are built where they stay, and the stamp comes last. Where packages come from is pip's own configuration.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..session.errors import EngineError

Report = Callable[[str], None]

STAMP = "complete"
# The largest takes gigabytes from an index that may be slow.
_COMMAND_TIMEOUT_S = 3600.0
_LOCK_TIMEOUT_S = 2 * _COMMAND_TIMEOUT_S
_LOCK_POLL_S = 0.2
_LAST_LINES = 15
_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
# Of pip's lines those that say how far it is. What it calls errors of an installation that goes on, such as packages
# that are missed and were left out on purpose, would only frighten; where it fails all lines are told.
_PIP_PROGRESS = ("Collecting", "Downloading", "Using cached", "Building", "Preparing", "Installing", "Successfully")
# Variables that would make a new environment see modules of this one.
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def built_once(folder: Path, build: Callable[[Path], None], report: Report) -> Path:
    """`folder`, built by `build` unless it is complete already. Whatever `build` raises leaves nothing behind."""
    if (folder / STAMP).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), folder.name, report):
        if (folder / STAMP).exists():  # another process built it while this one waited
            return folder
        if folder.exists():
            report(f"{folder.name}: was left half-built; starting again")
            shutil.rmtree(folder)
        folder.mkdir()
        try:
            build(folder)
            (folder / STAMP).touch()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return folder


def make_venv(folder: Path, report: Report) -> Path:
    """A new virtual environment with a pip of today; returns its interpreter."""
    report(f"{folder.name}: new environment for Python {sys.version_info.major}.{sys.version_info.minor}")
    run([sys.executable, "-m", "venv", "--clear", str(folder)], report, what=folder.name)
    python = folder / "bin" / "python"
    pip(python, ["install", "--upgrade", "pip"], report, what=folder.name)
    return python


def pip(python: Path, arguments: Sequence[str], report: Report, *, what: str) -> None:
    """Run pip in an environment."""
    run(
        [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments],
        report,
        what=what,
        shown=_PIP_PROGRESS,
        remedy="look at the lines above: the index that pip is configured for, the network, the space on the disk",
    )


def run(
    command: Sequence[str],
    report: Report,
    *,
    what: str,
    environ: Mapping[str, str] | None = None,
    shown: tuple[str, ...] = (),
    remedy: str = "look at the lines above",
) -> None:
    """Run a command to its end, reporting its lines (those that begin with one of `shown`, if any are named).

    EngineError with the last of all lines when it fails.
    """
    last: deque[str] = deque(maxlen=_LAST_LINES)
    deadline_s = time.monotonic() + _COMMAND_TIMEOUT_S
    process = subprocess.Popen(
        list(command),
        env=clean_environ(os.environ if environ is None else environ, keep_path=environ is not None),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if text := line.strip():
                    last.append(text)
                    if not shown or text.startswith(shown):
                        report(f"{what}: {text}")
                if time.monotonic() > deadline_s:
                    raise EngineError(
                        f"{what}: not done within {_COMMAND_TIMEOUT_S:g} s; try again with a faster index"
                    )
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        lines = "".join(f"\n    {text}" for text in last)
        raise EngineError(f"{what}: {' '.join(command[:6])} ... ended with {process.returncode}:{lines}\n  {remedy}")


def output(command: Sequence[str], *, what: str) -> str:
    """What a short command prints. EngineError when it fails."""
    done = subprocess.run(
        list(command),
        env=clean_environ(os.environ, keep_path=False),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise EngineError(f"{what}: {done.stderr.strip()[-2000:] or f'exit code {done.returncode}'}")
    return done.stdout


def site_of(python: Path) -> Path:
    """Where an environment's packages lie."""
    return Path(output([str(python), "-c", _SITE], what=str(python)).strip())


def put_module(python: Path, name: str, source: str) -> None:
    """Have every interpreter of an environment import a module of this source as it starts, and call its `install`.

    Left alone where it is there already, so that engines may run meanwhile.
    """
    site = site_of(python)
    for file, text in ((f"{name}.py", source), (f"{name}.pth", f"import {name}; {name}.install()\n")):
        place = site / file
        if not place.is_file() or place.read_text() != text:
            made = site / f"{file}.{os.getpid()}"
            made.write_text(text)
            made.replace(place)


def clean_environ(environ: Mapping[str, str], *, keep_path: bool) -> dict[str, str]:
    """`environ` without what would let another environment's modules in."""
    return {k: v for k, v in environ.items() if k not in _FOREIGN or (keep_path and k == "PYTHONPATH")}


@contextmanager
def _locked(file: Path, name: str, report: Report) -> Iterator[None]:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline_s, told = time.monotonic() + _LOCK_TIMEOUT_S, False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if not told:
                report(f"{name}: another process builds it; waiting")
                told = True
            if time.monotonic() > deadline_s:
                raise EngineError(f"{name}: another process has held {file} for too long; end it and try again")
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)  # the kernel lets go of the lock, also when this process dies
