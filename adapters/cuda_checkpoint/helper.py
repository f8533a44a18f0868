"""The process that makes the driver's calls for one rank, so that a call that hangs can be ended.

    python -m midstream.adapters.cuda_checkpoint.helper --pid PID --started TICKS [--driver MODULE:FUNCTION]

One JSON object a line on standard input, one in answer on standard output: `{"op": "lock", "timeout_ms": 10000}`,
`{"op": "checkpoint"}`, `{"op": "restore", "pairs": {...}}`, `{"op": "unlock"}`, `{"op": "state"}`, `{"op": "look"}`,
each with `deadline_s`. It begins with `{"ready": true}`, or says why it cannot.

Invariants: no call is made for a process other than the one that was named, by pid and start; and it ends by itself: by
an alarm a little after each call's deadline, which the kernel delivers even within a driver, and when its keeper is
gone. Then it finishes what is under way, and if all that it has done is to lock the process, unlocks it: nobody else
would. What it inherits (the lock of the group's journal) says to the next keeper that it is still there.
"""

import argparse
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from .driver import Driver, DriverError, Op

LINE_BYTES_MAX = 64 * 1024
# The keeper ends a helper at the deadline; this is for when there is none any more.
GRACE_S = 5
# What asking and unlocking may take when nobody says.
OWN_S = 20.0
CUDA = "midstream.adapters.cuda_checkpoint.bindings:connect"


def connected(name: str) -> Driver:
    """The driver that `MODULE:FUNCTION` makes. DriverError where it cannot."""
    module, _, function = name.partition(":")
    make: Callable[[], Driver] = getattr(importlib.import_module(module), function)
    return make()


class Rank:
    """One process, and the calls for it."""

    def __init__(self, driver: Driver, pid: int, started: int) -> None:
        self._driver = driver
        self._pid = pid
        self._started = started
        self._pidfd = _opened(pid, started)
        # Locked by this helper, and told nothing more.
        self._only_locked = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """What came of a request; never raises."""
        try:
            self._require_alive()
            return {"ok": True, **self._done(request)}
        except DriverError as error:
            return {"ok": False, "code": error.code, "text": str(error)}
        except Exception as error:
            return {"ok": False, "code": "INTERNAL", "text": f"{type(error).__name__}: {str(error)[:300]}"}

    def let_go(self) -> None:
        """The keeper is gone: a process that is only locked goes on."""
        if self._only_locked:
            signal.alarm(int(OWN_S))
            self._require_alive()
            self._driver.unlock(self._pid)

    def _done(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case Op.LOCK:
                self._driver.lock(self._pid, int(request["timeout_ms"]))
                self._only_locked = True
                return {}
            case Op.CHECKPOINT:
                self._only_locked = False
                self._driver.checkpoint(self._pid)
                return {}
            case Op.RESTORE:
                self._driver.restore(self._pid, dict(request.get("pairs") or {}))
                # Its memory is where it was: to be locked is all that it still is.
                self._only_locked = True
                return {}
            case Op.UNLOCK:
                self._driver.unlock(self._pid)
                self._only_locked = False
                return {}
            case "state":
                return {"state": self._driver.state(self._pid).value}
            case "look":
                return self._look()
            case other:
                raise DriverError("REQUEST", f"unknown op {other!r:.40}")

    def _look(self) -> dict[str, Any]:
        """All that a preflight wants to know of machine and process."""
        about = self._driver.about()
        try:
            state: str | None = self._driver.state(self._pid).value
        except DriverError:
            state = None
        gpus = [{**asdict(gpu), "served": sorted(gpu.served)} for gpu in self._driver.devices()]
        held = dict(self._driver.held(self._pid).by_gpu)
        return {
            "state": state,
            "held": held,
            "gpus": gpus,
            "driver": list(about.driver),
            "missing": list(about.missing),
        }

    def _require_alive(self) -> None:
        looking = select.poll()
        looking.register(self._pidfd, select.POLLIN)
        if looking.poll(0):
            raise DriverError("GONE", f"process {self._pid} has ended")


def started_of(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None where there is none that lives."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _opened(pid: int, started: int) -> int:
    try:
        fd = os.pidfd_open(pid)
    except OSError as error:
        raise DriverError("GONE", f"there is no process {pid} ({error.strerror})") from error
    if started_of(pid) != started:
        os.close(fd)
        raise DriverError("GONE", f"process {pid} is not the one that was meant; that one has ended")
    return fd


def serve(rank: Rank, source: TextIO, sink: TextIO) -> None:
    """Answer requests until their end."""
    _say(sink, {"ready": True})
    while line := source.readline(LINE_BYTES_MAX):
        try:
            request = json.loads(line)
            # Whole seconds are what an alarm has.
            signal.alarm(max(int(float(request.get("deadline_s") or OWN_S)), 1) + GRACE_S)
        except (ValueError, AttributeError, TypeError):
            _say(sink, {"ok": False, "code": "REQUEST", "text": "not a request"})
            continue
        answer = rank.answer(request)
        signal.alarm(0)
        if not _say(sink, answer):
            break
    rank.let_go()


def _say(sink: TextIO, answer: dict[str, Any]) -> bool:
    try:
        sink.write(json.dumps(answer) + "\n")
        sink.flush()
    except OSError:  # nobody reads any more
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """Serve one rank; 1 where that cannot be done."""
    parser = argparse.ArgumentParser(prog="midstream.adapters.cuda_checkpoint.helper")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--started", type=int, required=True)
    parser.add_argument("--driver", default=CUDA)
    options = parser.parse_args(arguments)
    # A keeper's Ctrl-C is not for what is under way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(OWN_S) + GRACE_S)
    try:
        rank = Rank(connected(options.driver), options.pid, options.started)
    except DriverError as error:
        _say(sys.stdout, {"ready": False, "code": error.code, "text": str(error)})
        return 1
    signal.alarm(0)
    try:
        serve(rank, sys.stdin, sys.stdout)
    except DriverError as error:
        print(f"midstream: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
