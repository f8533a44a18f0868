"""What a gateway knows of its nodes."""

from dataclasses import replace

import pytest

from midstream.session.errors import ConfigError
from midstream.sidecar.fleet.record import Readiness, Record, Role
from midstream.sidecar.gateway.node_table import SUSPECT_S, NodeTable
from midstream.sidecar.gateway.urls import NODES_MAX, node_urls

READY = Record("a", Role.NODE, "http://a:1", readiness=Readiness.READY, slot_count=8)


class Heard:
    """A table, and what it has told."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.changes = 0
        self.asked: list[str] = []
        self.table = NodeTable(on_lost=self.lost.append, on_change=self._changed)
        self.table.ask_soon = self.asked.append
        self.table.add("a", "http://a:1")

    def _changed(self) -> None:
        self.changes += 1

    def hear(self, record: Record = READY, asked_s: float = 0.0) -> None:
        self.table.heard("a", "http://a:1", record, asked_s=asked_s)

    @property
    def state(self) -> str:
        node = self.table.get("a")
        return node.state if node is not None else "unknown"


def test_a_node_of_which_nothing_is_known_is_not_ready_and_cannot_be_lost() -> None:
    heard = Heard()
    assert heard.state == "unknown"
    heard.table.unheard("a", "why")
    heard.table.lost("a", "why")
    assert (heard.state, heard.lost) == ("lost", [])


def test_a_loss_is_told_once_and_the_node_can_come_back() -> None:
    heard = Heard()
    heard.hear()
    heard.table.lost("a", "why")
    heard.table.lost("a", "why")
    assert (heard.lost, heard.state) == (["a"], "lost")
    heard.hear()
    assert heard.state == "ready"
    heard.table.lost("a", "again")
    assert heard.lost == ["a", "a"]


def test_when_a_loss_is_told_the_node_is_not_ready_any_more() -> None:
    states: list[bool] = []
    table = NodeTable(on_lost=lambda name: states.append(any(n.is_ready for n in table.all())), on_change=lambda: None)
    table.heard("a", "http://a:1", READY, asked_s=0.0)
    table.lost("a", "why")
    assert states == [False]


def test_only_what_changes_is_told() -> None:
    heard = Heard()
    heard.hear()
    before = heard.changes
    heard.hear()
    assert heard.changes == before
    heard.hear(replace(READY, slot_count=9))
    assert heard.changes == before + 1


def test_a_suspicion_ends_with_an_answer_to_a_question_that_came_after_it() -> None:
    heard = Heard()
    heard.hear()
    heard.table.suspect("a", now_s=10.0)
    assert heard.asked == ["a"]
    heard.hear(asked_s=9.9)  # this question was on its way already
    assert heard.table.suspects(10.1) == {"a"}
    before = heard.changes
    heard.hear(asked_s=10.1)
    assert (heard.table.suspects(10.2), heard.changes) == (frozenset(), before + 1)


def test_a_suspicion_ends_by_itself_where_nobody_asks() -> None:
    heard = Heard()
    heard.hear()
    heard.table.suspect("a", now_s=10.0)
    assert heard.table.suspects(10.0 + SUSPECT_S - 0.01) == {"a"}
    assert heard.table.suspects(10.0 + SUSPECT_S) == frozenset()


def test_silence_is_logged_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    for why in ("its clock is +3600 s off", "its clock is +3601 s off", "it does not answer", "it does not answer"):
        heard.table.unheard("a", why)
    assert caplog.text.count("event=node_silent") == 2
    node = heard.table.get("a")
    assert node is not None
    assert node.why == "it does not answer"
    heard.hear()
    node = heard.table.get("a")
    assert node is not None
    assert node.why == ""


def test_a_node_that_is_gone_takes_its_counts_with_it() -> None:
    heard = Heard()
    heard.hear()
    heard.table.add_open("a", 3)
    heard.table.gone("a", "its lease is over")
    assert (heard.lost, heard.table.all()) == (["a"], [])
    heard.table.add_open("a", -1)  # its last session goes elsewhere
    heard.table.suspect("a", 0.0)
    assert (heard.table.all(), heard.table.suspects(0.0)) == ([], frozenset())


def test_nodes_are_named_or_get_names() -> None:
    assert node_urls("http://h:1,b=https://h:2/x/") == {"node-0": "http://h:1", "b": "https://h:2/x"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a=ftp://h",
        "a=http://",
        "a=http://h:0",
        "a=http://h:99999",
        "a=http://h/?x",
        "A=http://h",
        "a=http://h,a=http://i",
        "x" * 64 + "=http://h",
        ",".join(f"http://h:{i + 1}" for i in range(NODES_MAX + 1)),
    ],
)
def test_nodes_that_are_none_are_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match="node"):
        node_urls(text)
