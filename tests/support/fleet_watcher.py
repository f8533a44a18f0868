"""A process that watches a fleet: run as `python -m support.fleet_watcher URLS`.

Each line of its output is the time of the boot clock, a word and a member's id, when that changes: `there`, `fading` or
`over`. With the time alone it says that its picture is `stale`, or `fresh` again.
"""

import asyncio
import sys

from midstream.sidecar.fleet.clock import boot_clock_s
from midstream.sidecar.fleet.etcd import EtcdService
from midstream.sidecar.fleet.etcd_http import EtcdAccess
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.leased import LeasedCoordination


async def main(urls: str) -> None:
    fleet = LeasedCoordination(EtcdService(EtcdAccess(urls.split(",")), "fleet"), WhenAlone.STOP)
    known: dict[str, str] = {}
    was_stale = False
    async for picture in fleet.watch():
        is_stale = picture.stale_since_s is not None
        if is_stale != was_stale:
            say("stale" if is_stale else "fresh")
            was_stale = is_stale
        now: dict[str, str] = {
            member.id: "fading" if member.is_fading else "there" for member in picture.members.values()
        }
        for id in {*known, *now}:
            word = now.get(id, "over")
            if known.get(id) != word:
                say(f"{word} {id}")
        known = {**dict.fromkeys(known, "over"), **now}


def say(words: str) -> None:
    print(f"{boot_clock_s():.4f} {words}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
