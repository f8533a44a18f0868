"""Notices of Google Cloud: the end of a virtual machine for its host's maintenance, and preemption.

Owns its paths and what they mean. A machine that is migrated alive is not left: it stands still for a moment.
"""

import aiohttp

from .contract import Notice, NoticeError
from .metadata import EVERY_S, Metadata, refused

URL = "http://metadata.google.internal"
_MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
_PREEMPTED = "/computeMetadata/v1/instance/preempted"
_FLAVOR = {"Metadata-Flavor": "Google"}
# From the word on a preemption to the end.
_PREEMPTION_S = 30.0


class Gcp(Metadata):
    """The metadata server of Compute Engine."""

    name = "gcp"

    def __init__(self, url: str = URL, *, every_s: float = EVERY_S) -> None:
        super().__init__(url, every_s=every_s)

    async def look(self, http: aiohttp.ClientSession) -> Notice | None:
        """The more urgent of both."""
        if await self._word(http, _PREEMPTED) == "TRUE":
            return Notice("preempted", _PREEMPTION_S)
        match await self._word(http, _MAINTENANCE):
            case "TERMINATE_ON_HOST_MAINTENANCE":
                return Notice("the host's maintenance ends this machine")
            case "NONE" | "MIGRATE_ON_HOST_MAINTENANCE":
                return None
            case other:
                raise NoticeError(f"{self._url}{_MAINTENANCE} names an event that is not known here: {other[:60]!r}")

    async def _word(self, http: aiohttp.ClientSession, path: str) -> str:
        status, text, headers = await self.ask(http, path, _FLAVOR)
        if status != 200:
            raise refused(self._url, path, status)
        if headers.get("Metadata-Flavor") != "Google":
            raise NoticeError(f"{self._url} is not Google's metadata server; leave gcp out of drain.notices")
        return text.strip()
