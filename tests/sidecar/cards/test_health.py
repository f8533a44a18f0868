"""What a card's events and readings come to: when it is to be left, and that each reason is told once."""

from dataclasses import replace
from pathlib import Path

import pytest

from midstream.sidecar.cards.health import SLOW_S, Card, Event, Finding, Reading, heard, read, worked
from midstream.sidecar.cards.xid import TABLE, Verdict, known

GPU = "GPU-0"
WELL = Reading(GPU, "H200", ecc_uncorrected=3, remap_pending=False, remap_failed=False, recovery_action=0)


def after(*readings: Reading, at_s: float = 0.0) -> tuple[Card, list[Finding]]:
    card, found = Card(GPU), []
    for reading in readings:
        card, new = read(card, reading, at_s)
        found += new
    return card, found


def test_a_card_that_is_well_gives_no_reason_whatever_errors_it_had_before() -> None:
    card, found = after(WELL, WELL)
    assert (found, card.verdict) == ([], Verdict.IGNORE)


@pytest.mark.parametrize(
    ("change", "reason", "verdict", "is_suspect"),
    [
        ({"is_lost": True}, "lost", Verdict.MOVE, True),
        ({"ecc_uncorrected": 4}, "ecc", Verdict.MOVE, True),
        ({"remap_failed": True}, "remap-failed", Verdict.MOVE, True),
        ({"remap_pending": True}, "remap-pending", Verdict.WATCH, False),
        ({"recovery_action": 1}, "recovery", Verdict.MOVE, False),
        ({"recovery_action": 4}, "recovery", Verdict.MOVE, False),
        ({"slowed_by": frozenset({"thermal"})}, "thermal", Verdict.WATCH, False),
    ],
)
def test_each_fault_is_a_reason_and_is_told_once(
    change: dict[str, object], reason: str, verdict: Verdict, is_suspect: bool
) -> None:
    ill = replace(WELL, **change)  # type: ignore[arg-type]
    card, [found] = after(WELL, ill, ill, ill)
    assert (found.reason, found.verdict, found.is_suspect) == (reason, verdict, is_suspect)
    assert card.verdict is verdict


@pytest.mark.parametrize("limit", ["thermal", "power"])
def test_a_card_that_stays_slow_is_left_and_one_that_recovers_is_not(limit: str) -> None:
    slow = replace(WELL, slowed_by=frozenset({limit}))
    card, [first] = read(Card(GPU), slow, 100.0)
    assert first.verdict is Verdict.WATCH
    same, none = read(card, slow, 100.0 + SLOW_S / 2)
    assert none == ()
    _, [second] = read(same, slow, 100.0 + SLOW_S)
    assert (second.reason, second.verdict) == (limit, Verdict.MOVE)
    recovered, none = read(same, WELL, 100.0 + SLOW_S)
    assert (none, recovered.verdict) == ((), Verdict.IGNORE)
    again, [told] = read(recovered, slow, 200.0)
    assert told.verdict is Verdict.WATCH
    assert again.slow_since == {limit: 200.0}


def test_what_the_driver_told_of_stays_though_no_reading_shows_it() -> None:
    card, [found] = heard(Card(GPU), Event(GPU, 48))
    assert (found.reason, found.verdict, found.is_suspect) == ("xid-48", Verdict.MOVE, True)
    card, new = read(card, WELL, 0.0)
    assert (new, card.verdict) == ((), Verdict.MOVE)
    card, new = heard(card, Event(GPU, 48))
    assert (new, card.xids) == ((), {48: 2})


def test_an_xid_of_a_killed_process_is_counted_and_no_reason() -> None:
    card, new = heard(Card(GPU), Event(GPU, 45))
    assert (new, card.verdict, card.xids) == ((), Verdict.IGNORE, {45: 1})


@pytest.mark.parametrize(("name", "verdict"), [("ecc-double", Verdict.MOVE), ("ecc-storm", Verdict.WATCH)])
def test_events_that_are_no_xids_count_too(name: str, verdict: Verdict) -> None:
    _, [found] = heard(Card(GPU), Event(GPU, 0, name))
    assert (found.reason, found.verdict, found.is_suspect) == (name, verdict, verdict is Verdict.MOVE)


def test_an_xid_that_nobody_knows_is_watched() -> None:
    _, [found] = heard(Card(GPU), Event(GPU, 999))
    assert (found.verdict, found.text) == (Verdict.WATCH, "Xid 999: not in the table")


def test_every_xid_that_asks_for_a_reset_of_the_gpu_is_a_reason_to_move() -> None:
    resets = {code for code, xid in TABLE.items() if xid.action in ("RESET_GPU", "RESTART_BM", "RESTART_VM")}
    assert resets >= {46, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158}
    assert {TABLE[code].verdict for code in resets} == {Verdict.MOVE}


def test_what_concerns_links_says_so_and_what_concerns_memory_makes_kv_suspect() -> None:
    assert known(74).is_of_links
    assert not known(79).is_of_links
    assert [known(code).is_suspect for code in (48, 64, 79, 94, 95, 119)] == [True, True, True, True, True, False]


def test_a_card_that_is_busy_while_no_token_comes_hangs() -> None:
    card, _ = read(Card(GPU), replace(WELL, busy_percent=100), 0.0)
    card, none = worked(card, 3, 100, 0.0, 30.0)
    card, none = worked(card, 3, 100, 29.0, 30.0)
    assert none == ()
    card, [found] = worked(card, 3, 100, 31.0, 30.0)
    assert (found.reason, found.verdict) == ("hung", Verdict.MOVE)
    card, none = worked(card, 3, 100, 60.0, 30.0)
    assert none == ()
    card, _ = worked(card, 3, 101, 61.0, 30.0)
    assert card.verdict is Verdict.IGNORE


@pytest.mark.parametrize(("busy", "sessions"), [(100, 0), (50, 3), (None, 3)])
def test_a_card_that_is_idle_or_has_nobody_waiting_does_not_hang(busy: int | None, sessions: int) -> None:
    card, _ = read(Card(GPU), replace(WELL, busy_percent=busy), 0.0)
    for now_s in (0.0, 100.0, 1000.0):
        card, found = worked(card, sessions, 7, now_s, 30.0)
        assert found == ()


def test_the_page_on_cards_has_every_xid_with_its_verdict() -> None:
    page = (Path(__file__).parents[3] / "docs" / "card.md").read_text()
    table = page[page.index("## Xids") : page.index("## Figures")]
    found: dict[int, str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0][:1].isdigit():
            for part in cells[0].split(", "):
                first, _, last = part.partition(" to ")
                found |= dict.fromkeys(range(int(first), int(last or first) + 1), cells[2])
    assert set(found) == set(TABLE)
    for code, says in found.items():
        xid = TABLE[code]
        word = {Verdict.MOVE: "move", Verdict.WATCH: "watch", Verdict.IGNORE: "counted"}[xid.verdict]
        assert says.startswith(word) or (code == 154 and says.startswith("read at once")), code
        assert xid.is_suspect == ("suspect" in says), code
        assert xid.is_of_links == ("several cards" in says), code
