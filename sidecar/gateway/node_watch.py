"""Asks nodes again and again how they are: a source of the table where no service tells.

Owns the pace. Invariants: each node is asked by itself, so that one that is slow delays no other, and at most once at a
time; they are spread over the interval and stay so, and of many each is asked less often; one that has not answered for
`lost_after_s` is lost, and so is one that is another process than before. Every wait is bounded, and no failure ends
the watch of anybody.
"""

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import aiohttp

from ...proxy.fleet import Prover
from ..fleet.record import RECORD_BYTES_MAX, Record, decode
from ..fleet_api import LIFE, NODE_PATH
from ..replicas.signatures import WINDOW_S
from .answers import bounded_text
from .node_table import NodeTable
from .silence import Silence

_LOG = logging.getLogger("midstream.gateway")

ANSWER_S = 2.0
# The last question before a node is lost gets at least so long.
_ANSWER_S_MIN = 0.1
# All first questions together take so long for each thousand nodes; from the second on they fill the interval.
_FIRST_S = 1.0
_JITTER = 0.1
# However many nodes there are; each question costs both sides a third of a millisecond.
ASKED_PER_S_MAX = 250


class NodeWatch:
    """Follows the nodes at these URLs until it is cancelled."""

    def __init__(
        self, urls: Mapping[str, str], table: NodeTable, prover: Prover, *, poll_s: float, lost_after_s: float
    ) -> None:
        self._urls = dict(urls)
        self._table = table
        self._prover = prover
        self.every_s = max(poll_s, len(urls) / ASKED_PER_S_MAX)
        self._lost_after_s = lost_after_s
        self._lives: dict[str, str] = {}
        self._soon = {name: asyncio.Event() for name in urls}
        table.ask_soon = self._ask_soon
        for name, url in urls.items():
            table.add(name, url)

    async def follow(self) -> None:
        """Ask all of them, each at its own pace."""
        # As many connections as nodes: with fewer, those that hang would keep the others from being asked.
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=2 * self.every_s + ANSWER_S, ssl=self._prover.tls or True
        )
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http, asyncio.TaskGroup() as tasks:
            for name in self._urls:
                tasks.create_task(self._follow_one(http, name), name=f"node {name}")

    def _ask_soon(self, name: str) -> None:
        self._soon[name].set()

    async def _follow_one(self, http: aiohttp.ClientSession, name: str) -> None:
        silence = Silence(self._lost_after_s)
        await asyncio.sleep(random.random() * min(self.every_s, _FIRST_S * len(self._urls) / 1000))
        phase = random.random()
        while True:
            self._soon[name].clear()
            began_s = time.monotonic()
            try:
                await self._ask_once(http, name, silence)
            except Exception:
                # A defect here must not look like a fleet in which nothing happens any more.
                _LOG.exception("event=node_watch node=%s", name)
            took_s = time.monotonic() - began_s
            jittered = 1 + _JITTER * (2 * random.random() - 1)
            await self._rest(name, silence, phase * max(self.every_s * jittered - took_s, self.every_s / 4))
            phase = 1.0

    async def _rest(self, name: str, silence: Silence, wait_s: float) -> None:
        """Until it is time, or somebody wants to know."""
        if silence.has_begun and not silence.is_lost:
            # What follows is to be known in time, not at the end of a long interval.
            wait_s = max(min(wait_s, silence.left_s / 2), _ANSWER_S_MIN)
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(wait_s):
                await self._soon[name].wait()
        except TimeoutError:
            pass
        if silence.has_begun:
            silence.passed(time.monotonic() - began_s, wait_s)

    async def _ask_once(self, http: aiohttp.ClientSession, name: str, silence: Silence) -> None:
        asked_s = time.monotonic()
        at_most_s = ANSWER_S if silence.is_lost else min(ANSWER_S, max(silence.left_s, _ANSWER_S_MIN))
        record, life, why = await self._ask(http, self._urls[name], at_most_s)
        if record is not None:
            silence.heard()
            if self._lives.setdefault(name, life) != life:
                # The sessions of the one before are gone, whatever their connections say.
                self._table.lost(name, "it was started again")
                self._lives[name] = life
            self._table.heard(name, self._urls[name], record, asked_s=asked_s)
            return
        silence.passed(time.monotonic() - asked_s, at_most_s)
        self._table.unheard(name, why)
        if silence.is_lost:
            self._table.lost(name, why)

    async def _ask(self, http: aiohttp.ClientSession, url: str, at_most_s: float) -> tuple[Record | None, str, str]:
        """A node's record and life; or why there is none."""
        target = urlsplit(url).path + NODE_PATH
        try:
            async with (
                asyncio.timeout(at_most_s),
                http.get(url + NODE_PATH, headers=self._prover.headers("GET", target, b"")) as answer,
            ):
                text = await bounded_text(answer, RECORD_BYTES_MAX)
                if answer.status == 200:
                    return decode(text), answer.headers.get(LIFE, ""), ""
                if answer.status == 401:
                    return None, "", why_not_believed(answer.headers.get("Date", ""), time.time())
                return None, "", f"it answered {answer.status}: {text[:200]}"
        except TimeoutError:
            return None, "", "it does not answer"
        except (aiohttp.ClientError, OSError) as error:
            return None, "", f"{type(error).__name__}: {error}"
        except ValueError as error:
            return None, "", f"it said something that cannot be read: {error}"


def why_not_believed(date: str, now_s: float) -> str:
    """Why a node takes this gateway for a stranger: what its clock says (in an answer's `Date`) tells one reason."""
    try:
        off_s = parsedate_to_datetime(date).timestamp() - now_s
    except ValueError:
        off_s = 0.0
    if abs(off_s) > WINDOW_S - 1:
        return f"it does not believe this gateway: its clock is {off_s:+.0f} s off this one's; set the clocks of both"
    return "it does not believe this gateway: give both the same secret (fleet.secret_file)"
