"""What each kind of failure does to a world, and what ends it.

Owns the translation of a schedule's failures to acts. Each act is over by itself, or by the world's healing, which ends
all of them. Whether something happened at all is counted: a failure that befalls nobody proves nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from .loop import WORLD
from .schedule import Failure, Kind
from .service import HOST

if TYPE_CHECKING:
    from .node import SimNode
    from .world import World

# After a death so long passes before somebody starts it again.
_SLOW_S = 1.5


def befall(world: "World", failure: Failure) -> None:
    """Let it happen."""
    if _happens(world, failure):
        world.counts[failure.kind] += 1


def _happens(world: "World", failure: Failure) -> bool:
    node = world.nodes[failure.one % len(world.nodes)]
    gateway = world.gateways[failure.one % len(world.gateways)]
    service = world.shared.service
    match failure.kind:
        case Kind.NODE_KILL | Kind.NODE_POWER:
            if not node.is_up:
                return False
            node.kill(silently=failure.kind is Kind.NODE_POWER)
            _later(world, failure.for_s, node.start)
        case Kind.NODE_PAUSE | Kind.MACHINE_PAUSE:
            if not node.is_up:
                return False
            node.pause(engines=failure.kind is Kind.MACHINE_PAUSE)
            _later(world, failure.for_s, node.wake)
        case Kind.NODE_DRAIN:
            if not node.is_up:
                return False
            life = node.life
            node.drain(drains=True)
            ends = _replace if failure.much < 0.6 else _cancel_drain
            _later(world, failure.for_s + 1.0, lambda: ends(node, life))
        case Kind.WORKER_KILL:
            return node.kill_worker(failure.other)
        case Kind.WORKER_HANG:
            if not node.is_up:
                return False
            node.hang_worker(failure.other, hangs=True)
            _later(world, failure.for_s, lambda: node.hang_worker(failure.other, hangs=False))
        case Kind.CUT | Kind.CUT_ONE_WAY:
            one, other = _link(world, failure)
            ways = [(one, other)] if failure.kind is Kind.CUT_ONE_WAY else [(one, other), (other, one)]
            for source, target in ways:
                world.network.cut(source, target)
                _later(world, failure.for_s, lambda s=source, t=target: world.network.heal(s, t))
        case Kind.SLOW_LINK:
            one, other = _link(world, failure)
            world.network.slow(one, other, _SLOW_S * failure.much)
            _later(world, failure.for_s, lambda: world.network.slow(one, other, 0.0))
        case Kind.SERVICE_DOWN | Kind.SERVICE_SLOW | Kind.SERVICE_LOSSY | Kind.SERVICE_LATE:
            if service is None:
                return False
            field, value, usual = {
                Kind.SERVICE_DOWN: ("is_up", False, True),
                Kind.SERVICE_SLOW: ("slow_s", 6.0 * failure.much, 0.0),
                Kind.SERVICE_LOSSY: ("loss", 0.5 * failure.much, 0.0),
                Kind.SERVICE_LATE: ("late_s", 5.0 * failure.much, 0.0),
            }[failure.kind]
            setattr(service, field, value)
            _later(world, failure.for_s, lambda: setattr(service, field, usual))
        case Kind.SERVICE_COMPACTED:
            if service is None:
                return False
            service.compact()
        case Kind.LEASE_ENDED:
            if service is None or not service.members:
                return False
            service.end(sorted(service.members)[failure.one % len(service.members)])
        case Kind.DISK_LOST:
            if node.disk is None:
                return False
            node.disk.clear()
        case Kind.STORE_LOST:
            store = world.stores[failure.one % len(world.stores)]
            store.lose([world.chance.random() < failure.much for _ in range(len(store))])
        case Kind.GATEWAY_KILL:
            if not gateway.is_up:
                return False
            world.kill_gateway(gateway)
            _later(world, failure.for_s, gateway.start)
        case Kind.GATEWAY_PAUSE:
            if not gateway.is_up:
                return False
            gateway.pause()
            _later(world, failure.for_s, gateway.wake)
        case Kind.WALL_CLOCK:
            node.made.wall_offset_s = 120.0 * (failure.much - 0.5)
            _later(world, failure.for_s, lambda: setattr(node.made, "wall_offset_s", 0.0))
        case _:
            assert_never(failure.kind)
    return True


def _replace(node: "SimNode", life: int) -> None:
    """A drained node ends and is started again, unless it has been meanwhile."""
    if node.is_up and node.life == life:
        node.kill()
        node.start()


def _cancel_drain(node: "SimNode", life: int) -> None:
    """It serves again."""
    if node.life == life:
        node.drain(drains=False)


def _link(world: "World", failure: Failure) -> tuple[str, str]:
    """Two hosts between which something passes."""
    node = world.nodes[failure.one % len(world.nodes)].host
    gateway = world.gateways[failure.other % len(world.gateways)].host
    pairs = [(gateway, node), (gateway, node), (node, gateway)]
    if world.shared.service is not None:
        pairs += [(node, HOST), (HOST, node), (gateway, HOST)]
    if world.stores:
        pairs.append((node, world.stores[failure.other % len(world.stores)].host))
    return pairs[failure.other % len(pairs)]


def _later(world: "World", after_s: float, act: Callable[[], object]) -> None:
    """End something, unless the world has been healed by then."""
    world.loop.call_later(after_s, lambda: None if world.is_healed else act(), context=WORLD)
