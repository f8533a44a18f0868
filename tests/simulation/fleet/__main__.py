"""Plays seeded schedules one after another: `python -m simulation.fleet --seeds 10000`.

Owns the printing. A schedule that breaks a promise is told with its seed and its failures, made smaller, and the run
goes on; it ends with status 1 then. The same seed is the same story on any machine.
"""

import argparse
import logging
import sys
import time
from collections import Counter

from .growth import measured, told
from .schedule import Coordinating, Schedule, small
from .shrink import kind_of, shrunk
from .world import play

TOLD_MAX = 20
_EVERY = 100


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m simulation.fleet", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--for", type=float, default=float("inf"), dest="for_s", help="at most so many seconds")
    parser.add_argument("--whole", action="store_true", help="tell failing schedules as they are, not made smaller")
    parser.add_argument("--nodes", type=int, help="one large fleet of so many nodes, whose figures are told as JSON")
    parser.add_argument("--sessions", type=int, help="and so many sessions; 100 for each node if that is not said")
    parser.add_argument("--trouble", type=float, default=2.0, help="and so many failures for each node")
    services = [Coordinating.ETCD.value, Coordinating.KUBERNETES.value]
    parser.add_argument("--coordinating", choices=services, default=services[0], help="and this service")
    asked = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if asked.nodes is not None:
        sessions, coordinating = asked.sessions or 100 * asked.nodes, Coordinating(asked.coordinating)
        print(told(measured(asked.first, asked.nodes, sessions, asked.trouble, coordinating)))
        return 0
    began_s = time.monotonic()
    counted: Counter[str] = Counter()
    failed = played = 0
    for seed in range(asked.first, asked.first + asked.seeds):
        if time.monotonic() - began_s > asked.for_s or failed >= TOLD_MAX:
            break
        played += 1
        try:
            counted += play(small(seed)).counts
        except Exception as error:
            failed += 1
            _tell(small(seed), error, whole=asked.whole)
        if played % _EVERY == 0:
            print(f"{played} schedules, {failed} broken, {time.monotonic() - began_s:.0f} s", flush=True)
    for name, count in sorted(counted.items()):
        print(f"{count:10}  {name}")
    print(f"{played} schedules, {failed} broken a promise, {time.monotonic() - began_s:.0f} s")
    return 1 if failed else 0


def _tell(schedule: Schedule, error: Exception, *, whole: bool) -> None:
    print(f"seed {schedule.seed}: {type(error).__name__}: {error}")
    least = schedule if whole else shrunk(schedule, _fails)
    print("\n".join(f"    {line}" for line in least.lines()), flush=True)


def _fails(schedule: Schedule) -> str:
    try:
        play(schedule)
    except Exception as error:
        return kind_of(error)
    return ""


sys.exit(main())
