"""Notices of Azure: scheduled events that end this virtual machine.

Owns its paths and what they mean. Events of a scale set name all machines that they are about: those of others are
nothing to this one. Nothing is approved here: who operates the machine may want to do more before its end.
"""

from typing import Any

import aiohttp

from .contract import Notice, NoticeError
from .metadata import EVERY_S, Metadata, refused, seconds_until

URL = "http://169.254.169.254"
_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
# A machine that freezes goes on as it was.
_ENDS = frozenset({"Reboot", "Redeploy", "Preempt", "Terminate"})


class Azure(Metadata):
    """The instance metadata service of Azure."""

    name = "azure"

    def __init__(self, url: str = URL, *, every_s: float = EVERY_S) -> None:
        super().__init__(url, every_s=every_s)
        self._own_name = ""

    async def look(self, http: aiohttp.ClientSession) -> Notice | None:
        """The first of those that are about this machine."""
        if not self._own_name:
            self._own_name = await self._text(http, _NAME)
        text = await self._text(http, _EVENTS)
        told = self.parsed(text, _EVENTS)
        events = told.get("Events") if isinstance(told, dict) else None
        if not isinstance(events, list):
            raise NoticeError(f"{self._url}{_EVENTS} answered something else than is documented: {text[:80]!r}")
        mine = [event for event in events if isinstance(event, dict) and self._is_mine(event)]
        notices = [Notice(_text_of(event), seconds_until(str(event.get("NotBefore", "")))) for event in mine]
        return min(notices, key=lambda notice: notice.in_s if notice.in_s is not None else 0.0, default=None)

    def _is_mine(self, event: dict[str, Any]) -> bool:
        resources = event.get("Resources")
        about = isinstance(resources, list) and self._own_name in resources
        return about and event.get("EventType") in _ENDS and event.get("EventStatus") in ("Scheduled", "Started")

    async def _text(self, http: aiohttp.ClientSession, path: str) -> str:
        status, text, _ = await self.ask(http, path, _HEADERS)
        if status != 200:
            raise refused(self._url, path, status)
        return text.strip()


def _text_of(event: dict[str, Any]) -> str:
    return f"{event.get('EventType')} {str(event.get('EventId'))[:60]}"
