"""A cloud's metadata server, as a source of notices: asked again and again.

Owns the pace, the bounds of an answer and its time. Invariant: nothing is followed anywhere else (no redirects, no
proxy of the environment). What is asked, and what the answers mean, is each cloud's own file.
"""

import asyncio
import json
from abc import abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from ..bounded_body import bounded_body
from .contract import Notice, NoticeError, Tell

EVERY_S = 5.0
ANSWER_S = 3.0
ANSWER_BYTES_MAX = 256 << 10


class Metadata:
    """A metadata server at `url`."""

    name = ""

    def __init__(self, url: str, *, every_s: float = EVERY_S) -> None:
        self._url = url.rstrip("/")
        self._every_s = every_s

    @abstractmethod
    async def look(self, http: aiohttp.ClientSession) -> Notice | None:
        """What is announced now. Raises NoticeError."""

    async def follow(self, tell: Tell) -> None:
        """See Source.follow."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as http:
            while True:
                tell(await self.look(http))
                await asyncio.sleep(self._every_s)

    async def ask(
        self, http: aiohttp.ClientSession, path: str, headers: Mapping[str, str], *, method: str = "GET"
    ) -> tuple[int, str, Mapping[str, str]]:
        """Status, text and headers of an answer. Raises NoticeError where there is none."""
        try:
            async with http.request(method, self._url + path, headers=headers, allow_redirects=False) as answer:
                body = await bounded_body(answer.content, ANSWER_BYTES_MAX)
                return answer.status, body.decode(), answer.headers
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise NoticeError(
                f"the metadata server {self._url} does not answer {path} ({str(error) or type(error).__name__}); "
                f"is this machine in that cloud? Else leave {self.name} out of drain.notices"
            ) from error

    def parsed(self, text: str, path: str) -> Any:
        """An answer as JSON. Raises NoticeError."""
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise NoticeError(f"{self._url}{path} answered no JSON: {text[:80]!r}") from None


def seconds_until(text: str) -> float | None:
    """From now until a time, as one cloud or another writes it; None where it is none, as of what has begun."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            at = parse(text)
        except ValueError:
            continue
        return (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return None


def refused(url: str, path: str, status: int) -> NoticeError:
    """An answer that is neither what is asked for nor that there is none."""
    return NoticeError(f"{url}{path} answered {status}; is access to it restricted (hop limit, firewall)?")
