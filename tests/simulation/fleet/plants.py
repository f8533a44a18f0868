"""Defects that can be planted in the product, one at a time: what a simulation that proves something must find.

Owns the defects. Each is a small change of one rule, as a programmer could make it; `finds` is how that shows.
"""

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from midstream.proxy.account import Account
from midstream.proxy.coordinator import Outcome
from midstream.proxy.fenced import FencedResponse
from midstream.proxy.sessions import Sessions
from midstream.sidecar.fleet import fence, roster
from midstream.sidecar.gateway.coordinator import GatewayCoordinator
from midstream.sidecar.gateway.session import Stay
from midstream.sidecar.mover.lineage import Lineage
from midstream.sidecar.workers import Workers

from . import mover
from .engine import Kv, Run


@dataclass(frozen=True, slots=True)
class Plant:
    """One defect. `finds` are the kinds of failures by which it may show, and `near` is where it was found once."""

    plant: Callable[[], Any]
    finds: tuple[str, ...]
    near: int = 0


def _replaced(where: Any, name: str, what: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(where, name, what)


@asynccontextmanager
async def _not_the_only_one(self: Sessions, marker: Any) -> AsyncIterator[None]:
    """Whoever asks is let in, whatever its generation."""
    yield


def _ids_known_less_one(self: Account, ids: Sequence[int]) -> int:
    """The newest token that the client has is taken for one that it has not."""
    return max(0, _check_ids(self, ids) - 1)


_check_ids = Account.check_ids


def _text_known_less(self: Account, choice: Any) -> dict[str, int]:
    return {key: max(0, count - 6) for key, count in _check_text(self, choice).items()}


_check_text = Account.check_text


@contextlib.contextmanager
def _counted_short() -> Iterator[None]:
    with (
        mock.patch.object(Account, "check_ids", _ids_known_less_one),
        mock.patch.object(Account, "check_text", _text_known_less),
    ):
        yield


def _sends_at_once(self: FencedResponse, data: bytes) -> Any:
    """The fence is not asked."""
    return super(FencedResponse, self).write(data)


def _ended_without_counting(self: GatewayCoordinator, facts: Any, ending: str, tokens: int | None = None) -> None:
    session = self._sessions.get(facts.session)
    if session is not None:
        self.nodes.add_open(session.stay.node, 1)
    _ended(self, facts, ending, tokens)


_ended = GatewayCoordinator.ended


def _any_kv(kv: Kv, run: Run) -> Kv:
    """What is found is taken, whosever it is."""
    return kv


PLANTS = {
    "the fence is always open": Plant(
        _replaced(fence.Fence, "is_open", lambda self, now_s: True), ("two-owners",), near=5
    ),
    "the fence closes after the lease": Plant(_replaced(fence, "MARGIN", -1.0), ("two-owners",), near=5),
    "the service is believed": Plant(_replaced(roster, "lease_s_of", lambda member: 0), ("two-owners",), near=5),
    "the fence is not asked": Plant(_replaced(FencedResponse, "write", _sends_at_once), ("Unfenced",), near=5),
    "a node takes any generation": Plant(
        _replaced(Sessions, "_as_the_only_one", _not_the_only_one), ("two-runs", "KeyError"), near=43
    ),
    "delivered is counted short": Plant(_counted_short, ("order", "ids", "too-long"), near=2),
    "whatever happened is called exact": Plant(
        _replaced(Stay, "came_to", lambda self: Outcome.EXACT if self.reason else None), ("not-exact",), near=8
    ),
    "a snapshot forgets its lineage": Plant(
        _replaced(Lineage, "is_again", lambda self, slot: False), ("not-exact",), near=59
    ),
    "sessions are not counted off": Plant(_replaced(GatewayCoordinator, "ended", _ended_without_counting), ("tables",)),
    "epochs are not let go of": Plant(_replaced(Workers, "unassign", lambda self, session, epoch: None), ("leak",)),
    "KV is not compared": Plant(_replaced(mover, "_cut", _any_kv), ("SilentlyWrong",), near=5),
}
