"""Notices of AWS: spot interruptions, rebalance recommendations and scheduled events, by IMDS version 2.

Owns its paths and what they mean. Each path answers 404 while there is nothing; a token is asked for first, and anew
when it is refused.
"""

from typing import Any

import aiohttp

from .contract import Notice, NoticeError
from .metadata import EVERY_S, Metadata, refused, seconds_until

URL = "http://169.254.169.254"
_TOKEN = "/latest/api/token"
_TOKEN_S = 21_600
_SPOT = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
_SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"


class Aws(Metadata):
    """The instance metadata service of EC2."""

    name = "aws"

    def __init__(self, url: str = URL, *, every_s: float = EVERY_S) -> None:
        super().__init__(url, every_s=every_s)
        self._token = ""

    async def look(self, http: aiohttp.ClientSession) -> Notice | None:
        """The most urgent of the three."""
        spot = await self._found(http, _SPOT)
        if spot is not None:
            action = str(spot.get("action"))
            if action not in ("terminate", "stop", "hibernate"):
                raise NoticeError(f"{_SPOT} names an action that is not known here: {action[:40]!r}")
            return Notice(f"spot {action} at {str(spot.get('time'))[:40]}", seconds_until(str(spot.get("time"))))
        scheduled = await self._found(http, _SCHEDULED)
        active = [event for event in scheduled or () if isinstance(event, dict) and event.get("State") == "active"]
        notices = [_of_event(event) for event in active]
        if notices:
            return min(notices, key=lambda notice: notice.in_s if notice.in_s is not None else 0.0)
        if await self._found(http, _REBALANCE) is not None:
            return Notice("rebalance recommended")
        return None

    async def _found(self, http: aiohttp.ClientSession, path: str) -> Any:
        """What is there; None where nothing is. Raises NoticeError."""
        for _ in range(2):
            if not self._token:
                seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                status, text, _headers = await self.ask(http, _TOKEN, seconds, method="PUT")
                if status != 200:
                    raise refused(self._url, _TOKEN, status)
                self._token = text.strip()
            status, text, _headers = await self.ask(http, path, {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                break
            self._token = ""
        if status == 404:
            return None
        if status != 200:
            raise refused(self._url, path, status)
        found = self.parsed(text, path)
        if not isinstance(found, list if path == _SCHEDULED else dict):
            raise NoticeError(f"{self._url}{path} answered something else than is documented: {text[:80]!r}")
        return found


def _of_event(event: dict[str, Any]) -> Notice:
    text = f"{str(event.get('Code'))[:40]} {str(event.get('EventId'))[:60]}"
    return Notice(text, seconds_until(str(event.get("NotBefore"))))
