"""Which of a node's routes takes a request: as much of aiohttp's router as these need. Pure."""

import re
from collections.abc import Awaitable, Sequence
from typing import Any

from aiohttp import web

from .http import SimRequest

_NAME = re.compile(r"\\{(\w+)\\}")


class Router:
    """Routes with names in braces."""

    def __init__(self, routes: Sequence[web.RouteDef]) -> None:
        self._routes = [
            (route.method, re.compile(_NAME.sub(r"(?P<\1>[^/]+)", re.escape(route.path))), route.handler)
            for route in routes
        ]

    def route(self, request: SimRequest) -> Awaitable[web.StreamResponse] | None:
        """The handler's work, or None where no route is meant."""
        for method, pattern, handler in self._routes:
            found = pattern.fullmatch(request.path) if method == request.method else None
            if found is not None:
                request.match_info = found.groupdict()
                answering: Any = handler
                work: Awaitable[web.StreamResponse] = answering(request)
                return work
        return None
