"""Sends one session's latest snapshot to one store elsewhere: its missing blocks, a few at a time, then its manifest.

Owns the order of one sending. Invariants: a block that is there is not sent again; a manifest goes last; at most
`SENDERS` blocks are in memory; bytes go out only as the budget lets them. Where a newer snapshot takes the place of the
one that is being sent, it is that one's turn, and what was sent counts. Whose turn it is, others decide.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from ...session.disk_store import Head
from ...session.errors import StoreError
from ...session.ids import SessionId
from ...session.manifest import Manifest
from .budget import Budget
from .contract import ReplicaDraft, ReplicaStore

SENDERS = 4
# How often a snapshot may be replaced by a newer one while it is being sent, before another session has its turn.
RENEWALS_MAX = 16


class LocalStore(Protocol):
    """What is sent: this node's own store, which somebody else writes."""

    def heads(self) -> Sequence[Head]:
        """What each session's latest snapshot is, by its name."""
        ...

    def latest(self, session: SessionId) -> Manifest | None:
        """See Store.latest."""
        ...

    def get_stored(self, name: str) -> bytes:
        """A chunk's stored bytes."""
        ...


class LocalGone(Exception):
    """A block is not here any more, or damaged: its snapshot was replaced meanwhile, or is no good."""


class Sending:
    """Sends from `local`. `count` is told what there was to do: a name and how much; from several threads."""

    def __init__(
        self,
        name: str,
        local: LocalStore,
        budget: Budget,
        stopping: threading.Event,
        count: Callable[[str, int], None],
    ) -> None:
        self._local = local
        self._budget = budget
        self._stopping = stopping
        self._count = count
        self._senders = ThreadPoolExecutor(SENDERS, thread_name_prefix=f"send-{name}")

    def close(self) -> None:
        """Nothing more is sent."""
        self._senders.shutdown(wait=True, cancel_futures=True)

    def send(self, store: ReplicaStore, session: SessionId) -> Manifest:
        """Publish the session's latest snapshot there, and return it. Raises LocalGone, and StoreError of the store."""
        have: set[str] = set()
        with store.begin() as draft:
            for _ in range(RENEWALS_MAX):
                manifest = self._local.latest(session)
                if manifest is None:
                    raise LocalGone("no snapshot of it is left here")
                unknown = [name for name in dict.fromkeys(manifest.chunks) if name not in have]
                there = draft.keep_all(unknown)
                have |= there
                self._count("chunks_there", len(there))
                try:
                    self._put_all(draft, [name for name in unknown if name not in there], have)
                except LocalGone:
                    continue
                draft.publish(manifest)
                return manifest
        raise LocalGone(f"it was replaced {RENEWALS_MAX} times while it was being sent")

    def _put_all(self, draft: ReplicaDraft, names: Sequence[str], have: set[str]) -> None:
        """Send blocks, a few at a time; when this returns or raises, nobody sends any more."""
        sending: dict[Future[int], str] = {}
        rest = iter(names)
        try:
            while True:
                for name in rest:
                    sending[self._senders.submit(self._put, draft, name)] = name
                    if len(sending) >= SENDERS:
                        break
                if not sending:
                    return
                done, _ = wait(sending, return_when=FIRST_COMPLETED)
                for future in done:
                    size = future.result()
                    have.add(sending.pop(future))
                    self._count("chunks_sent", 1)
                    self._count("bytes_sent", size)
        finally:
            for future in sending:
                future.cancel()
            wait(sending)

    def _put(self, draft: ReplicaDraft, name: str) -> int:
        try:
            stored = self._local.get_stored(name)
        except StoreError as error:
            raise LocalGone(str(error)) from error
        if not self._budget.take(len(stored), self._stopping):
            raise LocalGone("this process ends")
        draft.put_stored(name, stored)
        return len(stored)
