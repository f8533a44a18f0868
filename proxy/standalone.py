"""The proxy in front of one worker, without a coordinator: what `loadtest.proxy_bench` measures.

Run it as `python -m midstream.proxy.standalone --worker URL`; it prints its own URL as the first line. Nothing can
take a session over here: a lost worker ends its sessions in a clear error. The daemon (sidecar/) is what people run.
"""

import argparse
import asyncio
import resource
import time
from collections.abc import Sequence

import uvloop
from aiohttp import web

from ..session.errors import Refused
from ..session.marker import Marker
from .coordinator import Outcome, Placement, Reason, SessionFacts
from .permission import Always
from .server import build_app, make_runner
from .settings import ProxySettings


class FarFence(Always):
    """A permission that costs what a node's does: its clock is read, and the end lies far ahead."""

    def __init__(self) -> None:
        self._until_s = time.clock_gettime(time.CLOCK_BOOTTIME) + 1e6

    def may_send(self) -> bool:
        """Yes."""
        return time.clock_gettime(time.CLOCK_BOOTTIME) < self._until_s


class OneWorker:
    """A coordinator that knows one worker and never hears of its death."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    async def admit(self, facts: SessionFacts) -> Placement:
        """The worker."""
        interrupted: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        return Placement("worker", self._base_url, Marker(facts.session, 1), interrupted)

    async def take_over(
        self,
        facts: SessionFacts,
        last: Placement,
        reason: Reason,
        delivered: Sequence[int],
        *,
        unseen: bool = False,
    ) -> Placement:
        """Nobody can."""
        raise Refused("no_standby", f"the only worker was lost ({reason}): send the request again")

    async def settled(self, facts: SessionFacts, placement: Placement) -> None:
        """Never called: nothing is taken over."""

    async def take_in(self, facts: SessionFacts, outputs: tuple[int, ...], *, unseen: bool = False) -> Placement:
        """There is no other node."""
        raise Refused("not_a_node", "this proxy is part of no fleet")

    def resumed(self, facts: SessionFacts, placement: Placement, gap_s: float) -> None:
        """Never called: nothing is taken over."""

    def journaled(self, facts: SessionFacts, placement: Placement) -> int:
        """Nothing is journaled here."""
        return 0

    def gave_up(self, facts: SessionFacts, placement: Placement) -> bool:
        """Nothing is noted here."""
        return False

    def outcome(self, facts: SessionFacts, tokens: int | None = None) -> Outcome | None:
        """Nothing is taken over."""
        return None

    def reported(self, facts: SessionFacts, placement: Placement, takeovers: int, outcome: Outcome | None) -> None:
        """Never called: the worker is no node."""

    def mismatched(self, facts: SessionFacts, placement: Placement, text: str) -> None:
        """Nothing to note."""

    def ended(self, facts: SessionFacts, ending: str, tokens: int | None = None) -> None:
        """Nothing to note."""

    def plain_upstream(self) -> str:
        """The worker."""
        return self._base_url


async def serve(worker: str, port: int, settings: ProxySettings, *, fenced: bool) -> None:
    """Serve until cancelled."""
    permits = FarFence() if fenced else None
    runner = make_runner(build_app(OneWorker(worker), settings, permits=permits))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", required=True, help="base URL of the worker")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (0: any free one)")
    parser.add_argument("--reattach-s", type=float, default=0.0, help="how long streams are kept without a reader")
    parser.add_argument("--fenced", action="store_true", help="ask before each write whether it may be sent")
    arguments = parser.parse_args()
    # Two descriptors a stream.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = ProxySettings(reattach_s=arguments.reattach_s)
    uvloop.run(serve(arguments.worker, arguments.port, settings, fenced=arguments.fenced))


if __name__ == "__main__":
    main()
