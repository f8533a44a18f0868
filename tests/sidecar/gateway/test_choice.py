"""Which node a session goes to, for whatever fleet."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from midstream.sidecar.fleet.record import Load, Readiness, Record, Role
from midstream.sidecar.gateway.nodes import SPREAD, Node, choose

MODELS = ("m", "n")


def node(name: str, **fields: object) -> Node:
    slots, open_count = fields.pop("slots", 8), fields.pop("open", 0)
    record = Record(name, Role.NODE, "http://h:1", **{"readiness": Readiness.READY, "slot_count": slots, **fields})  # type: ignore[arg-type]
    return Node(name, "http://h:1", record, open_count)  # type: ignore[arg-type]


names = st.integers(0, 10_000).map(lambda i: f"node-{i}")
records = st.fixed_dictionaries(
    {
        "readiness": st.sampled_from(Readiness),
        "load": st.sampled_from(Load),
        "models": st.sampled_from([(), ("m",), ("m", "n")]),
        "keys": st.sampled_from([(), ("k1",), ("k2",)]),
        "slots": st.integers(0, 64),
        "open": st.integers(0, 64),
    }
)
fleets = st.dictionaries(names, records, max_size=12).map(lambda d: [node(name, **f) for name, f in d.items()])
beginnings = st.one_of(st.just(b""), st.binary(min_size=16, max_size=16))


@given(fleets, beginnings, st.sampled_from(["", "m", "n", "x"]), st.sets(names, max_size=4), st.sets(names, max_size=4))
def test_who_is_chosen_is_ready_serves_the_model_and_is_not_ruled_out(
    nodes: list[Node], beginning: bytes, model: str, never: set[str], rather_not: set[str]
) -> None:
    chosen = choose(nodes, model=model, beginning=beginning, never=never, rather_not=rather_not)
    named = any(n.record is not None and model in n.record.models for n in nodes)
    able = [n for n in nodes if n.record is not None and n.is_ready and n.id not in never]
    if named:
        able = [n for n in able if n.record is not None and (not n.record.models or model in n.record.models)]
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able
        if any(n.id not in rather_not for n in able):
            assert chosen.id not in rather_not


@given(fleets, beginnings)
def test_a_lost_node_is_never_chosen(nodes: list[Node], beginning: bytes) -> None:
    lost = [replace(n, record=None) for n in nodes]
    assert choose(lost, beginning=beginning) is None


@given(fleets, beginnings)
def test_who_can_use_its_kv_comes_first(nodes: list[Node], beginning: bytes) -> None:
    chosen = choose(nodes, beginning=beginning, keys=("k1",))
    ready = [n for n in nodes if n.is_ready]
    roomy = [n for n in ready if n.record is not None and n.record.load is not Load.FULL] or ready
    if any("k1" in n.keys for n in roomy):
        assert chosen is not None
        assert "k1" in chosen.keys


@given(st.integers(1, 12), st.lists(st.integers(0, 3), max_size=300))
def test_no_node_has_much_more_than_its_share_however_much_begins_alike(count: int, begun: list[int]) -> None:
    nodes = {f"node-{i}": node(f"node-{i}", slots=4 * (1 + i % 3)) for i in range(count)}
    for which in begun:
        chosen = choose(list(nodes.values()), beginning=bytes([which]) * 16)
        assert chosen is not None
        nodes[chosen.id] = replace(chosen, open=chosen.open + 1)
    share = sum(n.open for n in nodes.values()) / sum(n.slots for n in nodes.values())
    for n in nodes.values():
        # One more than its share is what a node without any may always have.
        assert n.open <= SPREAD * share * n.slots + 1


def test_what_begins_alike_goes_to_one_node_while_that_has_room() -> None:
    nodes = [node(f"node-{i}", slots=1000, open=100) for i in range(10)]
    chosen = {choose(nodes, beginning=b"a" * 16) for _ in range(5)}
    assert len(chosen) == 1


@given(st.integers(3, 20))
def test_another_node_takes_only_its_own_part(count: int) -> None:
    nodes = [node(f"node-{i}", slots=1000, open=10) for i in range(count)]
    beginnings = [i.to_bytes(16, "big") for i in range(400)]
    before = [choose(nodes, beginning=b) for b in beginnings]
    more = [*nodes, node("node-new", slots=1000, open=10)]
    after = [choose(more, beginning=b) for b in beginnings]
    moved = [(a, b) for a, b in zip(before, after, strict=True) if a != b]
    assert all(b is not None and b.id == "node-new" for _, b in moved)
    assert len(moved) < 2.5 * 400 / (count + 1)
    assert moved


def test_a_node_keeps_its_part_through_all_of_its_lives() -> None:
    first = [node(f"node-{i}") for i in range(8)]
    lives = [replace(n, id=f"{n.id}.10s.{i:016x}") for i, n in enumerate(reversed(first))]
    for i in range(100):
        beginning = i.to_bytes(16, "big")
        chosen, again = choose(first, beginning=beginning), choose(lives, beginning=beginning)
        assert chosen is not None
        assert again is not None
        assert again.name == chosen.name


def test_without_a_beginning_the_least_busy_node_is_taken() -> None:
    nodes = [node("a", open=3, slots=4), node("b", open=4, slots=16), node("c", open=2, slots=4)]
    chosen = choose(nodes)
    assert chosen is not None
    assert chosen.id == "b"
