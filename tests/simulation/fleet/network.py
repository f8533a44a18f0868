"""The network between hosts: connections whose bytes arrive late, in order, or not until a cut link is whole again.

Owns links and connections. Invariants: what is sent on one connection arrives in order, at most once, and nothing
arrives that was not sent; a link that is cut in one direction holds what goes that way, as TCP does, and loses what
asks for a new connection; a host whose process died says so to whoever sends, one that lost its power says nothing.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from .loop import WORLD, Process, SimLoop

CONNECT_TIMEOUT_S = 2.0
# What may be on its way on one connection before who writes has to wait, in messages.
WINDOW = 64
LOOPBACK_S = 0.0002


class Closed:
    """The last thing that comes from a peer."""


CLOSED = Closed()


class End:
    """One end of a connection. `heard` is told each message, and CLOSED at the last."""

    def __init__(self, network: "Network", process: Process, host: str) -> None:
        self.process = process
        self.host = host
        self.is_closed = False
        self.heard: Callable[[Any], None] = lambda message: None
        self.on_room: Callable[[], None] = lambda: None
        self.peer: End = self
        self._network = network
        # When each may arrive, and what it is.
        self._line: deque[tuple[float, Any]] = deque()
        self.under_way = 0

    def send(self, message: Any) -> bool:
        """On its way, unless this end is closed or its process dead."""
        if self.is_closed or not self.process.is_alive:
            return False
        self._post(message)
        return True

    def close(self) -> None:
        """Nothing is sent or heard here any more; the peer learns of it."""
        if not self.is_closed:
            self.is_closed = True
            self._network.forget(self)
            if self._network.is_powered(self.host):
                self._post(CLOSED, self._network.lost_s(self.host, self.peer.host))

    def vanish(self) -> None:
        """Its host lost its power: nobody is told."""
        self.is_closed = True

    def _post(self, message: Any, late_s: float = 0.0) -> None:
        self.under_way += 1
        network = self._network
        latency_s = network.latency_s(self.host, self.peer.host)
        self._line.append((network.loop.now_s + latency_s + late_s, message))
        if len(self._line) == 1:
            self._go_on()

    def _go_on(self) -> None:
        """What is first in line arrives at its time, and what is behind it not before."""
        network = self._network
        if network.is_cut(self.host, self.peer.host):
            network.holding.setdefault((self.host, self.peer.host), {})[self] = None
        else:
            network.loop.call_at(max(self._line[0][0], network.loop.now_s), self._arrive, context=WORLD)

    def flow_again(self) -> None:
        """The link is whole again."""
        if self._line:
            self._go_on()

    def _arrive(self) -> None:
        network, peer = self._network, self.peer
        if network.is_cut(self.host, peer.host):
            self._go_on()
            return
        _, message = self._line.popleft()
        if self._line:
            self._go_on()
        self.under_way -= 1
        if self.under_way < WINDOW:
            self.on_room()
        if not peer.is_closed:
            if message is CLOSED:
                peer.is_closed = True
                network.forget(peer)
            peer.heard(message)
        elif message is not CLOSED and not self.is_closed and network.is_powered(peer.host):
            # A reset: whoever sends to nobody is told.
            network.loop.call_later(network.latency_s(peer.host, self.host), self._reset, context=WORLD)

    def _reset(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._network.forget(self)
            self.heard(CLOSED)


Accept = Callable[[End], None]


class Network:
    """All hosts, and who listens where."""

    def __init__(self, loop: SimLoop, chance: random.Random, last_lost: float = 0.0) -> None:
        self.loop = loop
        self._chance = chance
        # How often the last of a connection is lost, and sent again later.
        self._last_lost = last_lost
        self._cut: dict[tuple[str, str], int] = {}
        self._slow: dict[tuple[str, str], float] = {}
        self._dark: set[str] = set()
        self._listeners: dict[str, tuple[Process, str, Accept]] = {}
        self.holding: dict[tuple[str, str], dict[End, None]] = {}
        self.ends_of: dict[Process, dict[End, None]] = {}
        self.connections = 0

    # ---- how links are

    def cut(self, source: str, target: str) -> None:
        """Nothing passes from one to the other until as many `heal`s."""
        self._cut[source, target] = self._cut.get((source, target), 0) + 1

    def heal(self, source: str, target: str) -> None:
        """What was held goes on."""
        left = self._cut.get((source, target), 0) - 1
        if left > 0:
            self._cut[source, target] = left
            return
        self._cut.pop((source, target), None)
        for end in self.holding.pop((source, target), {}):
            end.flow_again()

    def slow(self, source: str, target: str, by_s: float) -> None:
        """A link that takes longer; 0: as usual."""
        self._slow[source, target] = by_s

    def heal_all(self) -> None:
        """All links are whole and quick."""
        self._slow.clear()
        for source, target in list(self._cut):
            self._cut[source, target] = 1
            self.heal(source, target)

    def is_cut(self, source: str, target: str) -> bool:
        """Whether nothing passes."""
        return (source, target) in self._cut

    def latency_s(self, source: str, target: str) -> float:
        """How long the next message takes."""
        if source == target:
            return LOOPBACK_S
        return 0.0005 + 0.002 * self._chance.random() + self._slow.get((source, target), 0.0)

    def lost_s(self, source: str, target: str) -> float:
        """How much later the last of a connection comes, which nothing behind it brings along where it is lost."""
        if source == target or self._chance.random() >= self._last_lost:
            return 0.0
        return self._chance.uniform(0.2, 3.0)

    def is_powered(self, host: str) -> bool:
        """Whether anybody answers there, if only to say that nobody listens."""
        return host not in self._dark

    # ---- processes

    def born(self, process: Process) -> None:
        """A process that may have connections."""
        self.ends_of[process] = {}

    def died(self, process: Process, host: str, *, silently: bool) -> None:
        """Its kernel closes what it had open; with its power off nobody does."""
        if silently:
            self._dark.add(host)
        for name in [name for name, (who, _, _) in self._listeners.items() if who is process]:
            del self._listeners[name]
        for end in list(self.ends_of.pop(process, {})):
            if silently:
                end.vanish()
            elif not end.is_closed:
                end.is_closed = True
                end._post(CLOSED)

    def powered_on(self, host: str) -> None:
        """The host is there again."""
        self._dark.discard(host)

    def forget(self, end: End) -> None:
        """It is closed."""
        self.ends_of.get(end.process, {}).pop(end, None)

    def listen(self, address: str, process: Process, host: str, accept: Accept) -> None:
        """New connections to `address` are given to `accept`."""
        self._listeners[address] = (process, host, accept)

    def unlisten(self, address: str) -> None:
        """Nobody is there any more."""
        self._listeners.pop(address, None)

    def hosts_of(self, address: str) -> str:
        """Where an address is: its part before the colon."""
        return address.partition(":")[0]

    async def connect(self, process: Process, host: str, address: str) -> End:
        """A connection to whoever listens there. ConnectionRefusedError, or TimeoutError after a while."""
        target = self.hosts_of(address)
        there_s, back_s = self.latency_s(host, target), self.latency_s(target, host)
        if self.is_cut(host, target) or self.is_cut(target, host) or not self.is_powered(target):
            await asyncio.sleep(CONNECT_TIMEOUT_S)
            raise TimeoutError(f"{address} does not answer")
        await asyncio.sleep(there_s + back_s)
        found = self._listeners.get(address)
        if found is None or process not in self.ends_of:
            raise ConnectionRefusedError(f"{address} refuses")
        server, server_host, accept = found
        self.connections += 1
        near, far = End(self, process, host), End(self, server, server_host)
        near.peer, far.peer = far, near
        self.ends_of[process][near] = None
        self.ends_of[server][far] = None
        accept(far)
        return near
