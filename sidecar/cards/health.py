"""From events and readings of a card to what is to be done about it: a pure fold.

Owns when a card is to be left. Invariants: each reason is told once, when it appears; what a card was told of by its
driver stays until this process ends, what is only read goes when the reading does. Time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .xid import Verdict, known

# Hot or short of power for so long: it will not pass by itself, and each step takes several times as long.
SLOW_S = 10.0
BUSY_PERCENT = 95
# As NVML numbers them; 0 is none.
RECOVERY_ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain what uses its links",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset its bus",
    7: "reboot the system",
}
_LINK_ACTIONS = (3, 5)
# Events that are no Xids, and after which the card's memory is not to be trusted.
_GRAVE = ("ecc-double", "row-not-retired", "poison", "poison-fatal", "unavailable")


@dataclass(frozen=True, slots=True)
class Event:
    """What the driver told by itself. `xid`: 0 where it is no Xid but what `name` says."""

    uuid: str
    xid: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """A card as it was found; None where it does not tell. `slowed_by`: `thermal`, `power`, or nothing."""

    uuid: str
    model: str = ""
    is_lost: bool = False
    ecc_uncorrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    recovery_action: int | None = None
    slowed_by: frozenset[str] = frozenset()
    busy_percent: int | None = None
    temperature_c: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    pids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason.

    `is_suspect`: KV on the card is not to be trusted. `is_of_links`: only workers on several cards mind.
    """

    uuid: str
    reason: str
    verdict: Verdict
    text: str
    is_suspect: bool = False
    is_of_links: bool = False


@dataclass(frozen=True, slots=True)
class Card:
    """What is known of a card. `found` by reason; `xids`: how often each came."""

    uuid: str
    found: Mapping[str, Finding] = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    xids: Mapping[int, int] = field(default_factory=dict)
    reading: Reading | None = None
    ecc_before: int | None = None
    slow_since: Mapping[str, float] = field(default_factory=dict)
    # Of the worker on it: its tokens when they last changed, and when that was.
    tokens: int = -1
    moved_s: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The worst of what was found."""
        order = list(Verdict)
        return max((f.verdict for f in self.found.values()), key=order.index, default=Verdict.IGNORE)


def heard(card: Card, event: Event) -> tuple[Card, tuple[Finding, ...]]:
    """The card after an event, and what is new."""
    if not event.xid:
        is_grave = event.name in _GRAVE
        verdict = Verdict.MOVE if is_grave else Verdict.WATCH
        finding = Finding(card.uuid, event.name, verdict, f"the driver tells of {event.name}", is_suspect=is_grave)
        return _with(card, finding, sticks=True)
    xid = known(event.xid)
    counted = replace(card, xids={**card.xids, event.xid: card.xids.get(event.xid, 0) + 1})
    if xid.verdict is Verdict.IGNORE:
        return counted, ()
    action = f"; NVIDIA: {xid.action}" if xid.action else ""
    text = f"Xid {xid.code}: {xid.name}{action}"
    finding = Finding(card.uuid, f"xid-{xid.code}", xid.verdict, text, xid.is_suspect, xid.is_of_links)
    return _with(counted, finding, sticks=True)


def read(card: Card, reading: Reading, now_s: float) -> tuple[Card, tuple[Finding, ...]]:
    """The card after a reading, and what is new."""
    uuid = card.uuid
    found: list[Finding] = []
    if reading.is_lost:
        text = "the driver has lost it; reset it, or restart the machine"
        found.append(Finding(uuid, "lost", Verdict.MOVE, text, is_suspect=True))
    before = card.ecc_before
    if reading.ecc_uncorrected is not None and before is not None and reading.ecc_uncorrected > before:
        text = f"{reading.ecc_uncorrected - before} uncorrected memory errors since this began"
        found.append(Finding(uuid, "ecc", Verdict.MOVE, text, is_suspect=True))
    if reading.remap_failed:
        text = "a row of its memory could not be replaced; have the card exchanged"
        found.append(Finding(uuid, "remap-failed", Verdict.MOVE, text, is_suspect=True))
    if reading.remap_pending:
        text = "a row of its memory is to be replaced at the next reset; reset it when nobody uses it"
        found.append(Finding(uuid, "remap-pending", Verdict.WATCH, text))
    if reading.recovery_action:
        text = f"its driver asks to {RECOVERY_ACTIONS.get(reading.recovery_action, 'recover it')}"
        of_links = reading.recovery_action in _LINK_ACTIONS
        found.append(Finding(uuid, "recovery", Verdict.MOVE, text, is_of_links=of_links))
    slow_since = {cause: card.slow_since.get(cause, now_s) for cause in reading.slowed_by}
    for cause, since_s in sorted(slow_since.items()):
        lasts_s = now_s - since_s
        verdict = Verdict.MOVE if lasts_s >= SLOW_S else Verdict.WATCH
        found.append(Finding(uuid, cause, verdict, f"it has been slowed down by its {cause} limit for {lasts_s:.0f} s"))
    first = reading.ecc_uncorrected if before is None else before
    # What a reading does not show any more is over, unless the driver told of it or it was lost or broken.
    kept = {reason: f for reason, f in card.found.items() if reason in card.told or reason in ("lost", "ecc", "hung")}
    after = replace(card, reading=reading, ecc_before=first, slow_since=slow_since, found=kept)
    new: list[Finding] = []
    for finding in found:
        after, more = _with(after, finding, sticks=False)
        # It was known before, and is no news.
        known_before = card.found.get(finding.reason)
        new += [f for f in more if known_before is None or known_before.verdict is not f.verdict]
    return after, tuple(new)


def worked(card: Card, sessions: int, tokens: int, now_s: float, patience_s: float) -> tuple[Card, tuple[Finding, ...]]:
    """Whether a card that is busy brings anything about: `tokens` is all that its worker has written, ever growing.

    A kernel that does not end keeps the card at work, while sessions wait and no token comes.
    """
    busy = card.reading.busy_percent if card.reading is not None else None
    if tokens != card.tokens or not sessions or busy is None or busy < BUSY_PERCENT:
        over = {reason: f for reason, f in card.found.items() if reason != "hung"}
        return replace(card, tokens=tokens, moved_s=now_s, found=over), ()
    if now_s - card.moved_s < patience_s:
        return card, ()
    text = f"busy for {now_s - card.moved_s:.0f} s, and none of {sessions} sessions got a token: a kernel hangs"
    return _with(card, Finding(card.uuid, "hung", Verdict.MOVE, text), sticks=False)


def _with(card: Card, finding: Finding, *, sticks: bool) -> tuple[Card, tuple[Finding, ...]]:
    before = card.found.get(finding.reason)
    told = card.told | {finding.reason} if sticks else card.told
    after = replace(card, found={**card.found, finding.reason: finding}, told=told)
    return after, () if before is not None and before.verdict is finding.verdict else (finding,)
