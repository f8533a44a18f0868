"""Watches the cards of this machine: a thread that asks NVML, and in the event loop what is known of each card.

Owns the thread. Invariants: NVML, which may hang with its driver, is asked in that thread alone; what it says is folded
by `health.py`; a finding is told once. Without NVML nothing is watched, and that is said once. What is done about a
finding is not decided here.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...session.errors import EngineError
from .health import Card, Event, Finding, Reading, heard, read, worked
from .nvml import Nvml, opened
from .xid import Verdict

_LOG = logging.getLogger("midstream.cards")

EVENT_WAIT_S = 0.5
END_S = 3.0
CARDS_MAX = 64
# Sessions and tokens of the workers on a card, by the pids that it says are on it.
Progress = Callable[[str, Reading], tuple[int, int]]


class CardWatch:
    """`on_finding` is called in the event loop.

    `progress`: sessions that wait for tokens on a card, and all it wrote.
    """

    def __init__(
        self,
        on_finding: Callable[[Finding], None],
        *,
        poll_s: float,
        progress: Progress = lambda uuid, reading: (0, 0),
        patience_s: float = 30.0,
        open_nvml: Callable[[], Nvml] = opened,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cards: dict[str, Card] = {}
        self._on_finding = on_finding
        self._poll_s = poll_s
        self._progress = progress
        self._patience_s = patience_s
        self._open_nvml = open_nvml
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        # When the last reading came, and why there is none.
        self.heard_s: float | None = None
        self.why_not = ""

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="cards", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End the thread; one that hangs in the driver is left to its fate."""
        self._is_over.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, END_S)

    def findings(self) -> list[Finding]:
        """All that holds now."""
        return [finding for card in self.cards.values() for finding in card.found.values()]

    def told(self) -> list[dict[str, Any]]:
        """For people and programs."""
        return [_told(card) for card in self.cards.values()]

    def uuids_of(self, pids: frozenset[int]) -> frozenset[str]:
        """The cards on which any of these processes is, as far as the driver tells."""
        there = ((card.uuid, card.reading) for card in self.cards.values())
        return frozenset(uuid for uuid, reading in there if reading is not None and reading.pids & pids)

    # ---- in the thread

    def _run(self) -> None:
        try:
            nvml = self._open_nvml()
        except EngineError as error:
            self._in_loop(self._cannot, str(error))
            return
        try:
            self._follow(nvml)
        finally:
            nvml.close()

    def _follow(self, nvml: Nvml) -> None:
        next_s = 0.0
        while not self._is_over.is_set():
            if time.monotonic() >= next_s:
                for uuid in nvml.cards()[:CARDS_MAX]:
                    self._in_loop(self._read, nvml.read(uuid))
                next_s = time.monotonic() + self._poll_s
            event = nvml.wait(min(EVENT_WAIT_S, self._poll_s))
            if event is not None:
                self._in_loop(self._heard, event)
                # What it is about is in the readings, mostly.
                next_s = 0.0

    def _in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- in the event loop

    def _cannot(self, why: str) -> None:
        self.why_not = why
        _LOG.info("event=cards_not_watched reason=%s", why)

    def _heard(self, event: Event) -> None:
        # An event whose card is not known is about one of them: nobody knows which, so all are looked at.
        for uuid in [event.uuid] if event.uuid in self.cards else list(self.cards):
            self._fold(*heard(self.cards[uuid], replace(event, uuid=uuid)))

    def _read(self, reading: Reading) -> None:
        self.heard_s = self._clock()
        card = self.cards.get(reading.uuid, Card(reading.uuid))
        self._fold(*read(card, reading, self.heard_s))
        sessions, tokens = self._progress(reading.uuid, reading)
        self._fold(*worked(self.cards[reading.uuid], sessions, tokens, self.heard_s, self._patience_s))

    def _fold(self, card: Card, new: tuple[Finding, ...]) -> None:
        self.cards[card.uuid] = card
        for finding in new:
            level = logging.ERROR if finding.verdict is Verdict.MOVE else logging.WARNING
            _LOG.log(level, "event=card gpu=%s reason=%s verdict=%s text=%s", finding.uuid, finding.reason,
                     finding.verdict.value, finding.text)  # fmt: skip
            try:
                self._on_finding(finding)
            except Exception:
                _LOG.exception("event=card_callback gpu=%s reason=%s", finding.uuid, finding.reason)


def _told(card: Card) -> dict[str, Any]:
    reading = card.reading or Reading(card.uuid)
    found: Mapping[str, str] = {reason: f.text for reason, f in card.found.items()}
    return {
        "gpu": card.uuid, "model": reading.model, "verdict": card.verdict.value, "found": found,
        "xids": {str(code): count for code, count in card.xids.items()}, "lost": reading.is_lost,
        "ecc_uncorrected": reading.ecc_uncorrected, "remap_pending": reading.remap_pending,
        "remap_failed": reading.remap_failed, "recovery_action": reading.recovery_action,
        "slowed_by": sorted(reading.slowed_by), "busy_percent": reading.busy_percent,
        "temperature_c": reading.temperature_c, "free_bytes": reading.free_bytes, "total_bytes": reading.total_bytes,
    }  # fmt: skip
