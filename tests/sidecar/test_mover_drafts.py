"""Nothing of a store is done in the mover's event loop, from which engines are answered."""

import threading
from types import TracebackType
from typing import cast

import pytest

from midstream.session.store import Store
from midstream.sidecar.mover.snapshots import _draft


class WatchedStore:
    """Notes in which thread a draft of it is begun and left."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def begin(self) -> "WatchedStore":
        self.threads.append(threading.get_ident())
        return self

    def __enter__(self) -> "WatchedStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.threads.append(threading.get_ident())


@pytest.mark.parametrize("breaks", [False, True])
async def test_a_draft_is_begun_and_left_in_worker_threads(breaks: bool) -> None:
    store = WatchedStore()
    try:
        async with _draft(cast(Store, store)) as draft:
            assert draft is cast(object, store)
            if breaks:
                raise RuntimeError("the session ended meanwhile")
    except RuntimeError:
        assert breaks
    assert len(store.threads) == 2
    assert threading.get_ident() not in store.threads
