"""What a session is told whose stream is kept. Only values."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from .orphans import Origin
from .permission import Permission
from .stream import Respond


@dataclass(frozen=True, slots=True)
class Keeping:
    """What a session is told whose stream is kept: to whom it speaks, as long as what permits it, and as whose stream.

    `is_new`: nothing of it has been said. `require_all_heard` raises while its client has more than was said here: then
    nobody but its node goes on with it. `forget`: for nodes, at their base URLs, that keep something of the stream
    and need not any more.
    """

    respond: Respond
    permission: Permission
    origin: Origin | None = None
    is_new: Callable[[], bool] | None = None
    require_all_heard: Callable[[], None] | None = None
    forget: Callable[[str], None] | None = None


# What answers a request; None: to its client, as ever.
Session = Callable[[Keeping | None], Coroutine[Any, Any, web.StreamResponse]]
