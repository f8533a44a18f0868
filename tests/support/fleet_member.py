"""A process that is a member of a fleet and sends as long as it may.

It is run as `python -m support.fleet_member URLS LEASE_SECONDS`.
Each line of its output is the time of the boot clock and a word: `joined <id>`, `send`, `hold` or `lost`.
"""

import asyncio
import sys

from midstream.sidecar.fleet.clock import boot_clock_s
from midstream.sidecar.fleet.etcd import EtcdService
from midstream.sidecar.fleet.etcd_http import EtcdAccess
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.record import Record, Role


async def main(urls: str, lease_s: int) -> None:
    fleet = LeasedCoordination(EtcdService(EtcdAccess(urls.split(",")), "fleet"), WhenAlone.STOP)
    joined = await fleet.join(Record("victim", Role.NODE, "http://127.0.0.1:1"), lease_s)
    say(f"joined {joined.id}")
    lost = asyncio.create_task(joined.lost())
    while not lost.done():
        # As a proxy does it: ask, then write, with nothing in between.
        say("send" if joined.may_send() else "hold")
        await asyncio.sleep(0.01)
    say("lost")
    await fleet.close()


def say(word: str) -> None:
    print(f"{boot_clock_s():.4f} {word}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
