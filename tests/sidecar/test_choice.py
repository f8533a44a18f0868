"""Where an interrupted session goes on: no choice may ever lose a token, use foreign KV or refuse without need."""

from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from midstream.session.key import REQUIRED, CompatibilityKey
from midstream.session.marker import KvSource
from midstream.sidecar.choice import (
    COMPUTED_ELSEWHERE,
    Account,
    Candidate,
    Plan,
    Tier,
    exactly,
    known_outputs,
    plan,
)

KV_TIERS = (Tier.HELD, Tier.IN_PLACE, Tier.MEMORY, Tier.DISK, Tier.REPLICA)


def key(**changes: str) -> CompatibilityKey:
    return CompatibilityKey({**{name: f"a {name}" for name in REQUIRED}, **changes})


KEY = key()


def account(**changes: object) -> Account:
    known = Account(
        journal=(1, 2, 3, 4),
        delivered=(1, 2),
        prompt_len=5,
        finish="",
        output_max=None,
        wants_logprobs=False,
        streamed=True,
        held_kv=True,
        stored_kv_len=0,
        epoch=("w0", 1),
        key=KEY,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def candidate(name: str = "w1", **changes: object) -> Candidate:
    ready = Candidate(name, 1, KEY, sessions=0, sessions_max=8, adopted=None)
    return replace(ready, **changes)  # type: ignore[arg-type]


def chosen(known: Account, *candidates: Candidate, without_kv: bool = False) -> Plan:
    found = plan(known, candidates, without_kv=without_kv)
    assert found is not None
    return found


def test_a_standby_goes_on_with_the_whole_journal_from_the_held_pool() -> None:
    found = chosen(account(), candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.HELD, (1, 2, 3, 4), (1, 2, 3, 4))
    assert found.kv is KvSource.HELD


def test_the_engine_that_runs_in_the_old_pool_is_preferred_to_any_copy() -> None:
    in_place = candidate("w0", epoch=2, adopted=("w0", 1), sessions=7)
    found = chosen(account(), candidate(), in_place)
    assert (found.tier, found.candidate) == (Tier.IN_PLACE, in_place)


def test_a_pool_that_was_adopted_from_another_epoch_is_not_in_place() -> None:
    assert chosen(account(), candidate("w0", epoch=3, adopted=("w0", 2))).tier is Tier.HELD


def test_without_a_pool_what_is_in_memory_comes_before_what_is_on_disk() -> None:
    known = account(held_kv=False, stored_kv_len=8, kept_kv_len=7)
    found = chosen(known, candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.MEMORY, (1, 2, 3), (1, 2, 3, 4))
    assert found.may_be_exact
    assert plan(known, [candidate()], tiers=frozenset({Tier.DISK})).tier is Tier.DISK  # type: ignore[union-attr]
    # The prompt alone is not enough to go on from, neither here nor there.
    assert chosen(account(held_kv=False, stored_kv_len=4, kept_kv_len=4), candidate()).tier is Tier.JOURNAL


def test_only_the_tiers_that_are_allowed_are_used() -> None:
    in_place = candidate("w0", epoch=2, adopted=("w0", 1))
    known = account(stored_kv_len=7)
    wanted = {
        frozenset({Tier.HELD}): Tier.HELD,
        frozenset({Tier.IN_PLACE}): Tier.IN_PLACE,
        frozenset({Tier.DISK}): Tier.DISK,
        frozenset({Tier.NONE}): Tier.JOURNAL,
    }
    for tiers, tier in wanted.items():
        found = plan(known, [in_place], tiers=tiers)
        assert found is not None
        assert found.tier is tier
    elsewhere = plan(known, [candidate()], tiers=frozenset({Tier.IN_PLACE}))
    assert elsewhere is not None
    assert elsewhere.tier is Tier.JOURNAL


def test_the_disk_cuts_where_its_snapshot_ends_and_the_rest_is_compared() -> None:
    found = chosen(account(held_kv=False, stored_kv_len=6), candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.DISK, (1, 2), (1, 2, 3, 4))


def test_a_snapshot_of_the_prompt_alone_is_no_place_to_go_on() -> None:
    assert chosen(account(held_kv=False, stored_kv_len=4), candidate()).tier is Tier.JOURNAL


def test_what_is_elsewhere_is_used_where_nothing_is_here_or_it_goes_very_much_further() -> None:
    found = chosen(account(held_kv=False, replica_kv_len=7), candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.REPLICA, (1, 2, 3), (1, 2, 3, 4))
    assert chosen(account(held_kv=False, stored_kv_len=6, replica_kv_len=8), candidate()).tier is Tier.DISK
    assert chosen(account(replica_kv_len=8), candidate()).tier is Tier.HELD
    long = tuple(range(1, 1001))
    for ahead, tier in ((256, Tier.DISK), (257, Tier.REPLICA)):
        known = account(journal=long, delivered=(1,), held_kv=False, stored_kv_len=104, replica_kv_len=104 + ahead)
        assert chosen(known, candidate()).tier is tier
    without = frozenset(set(Tier) - {Tier.REPLICA})
    fallen = plan(account(held_kv=False, replica_kv_len=7), [candidate()], tiers=without)
    assert fallen is not None
    assert fallen.tier is Tier.JOURNAL


def test_a_snapshot_of_kv_that_was_computed_again_goes_on_but_is_never_called_exact() -> None:
    known = account(held_kv=False, replica_kv_len=7, replica_again=True)
    found = chosen(known, candidate())
    assert (found.tier, found.outputs) == (Tier.REPLICA, (1, 2, 3))
    assert not found.may_be_exact
    assert found.detail == COMPUTED_ELSEWHERE
    assert exactly(found, known, [candidate()]) is None
    assert not chosen(account(held_kv=False, stored_kv_len=7, stored_again=True), candidate()).may_be_exact
    # Of one output nothing was computed again but the prompt, as in any run.
    assert chosen(account(held_kv=False, replica_kv_len=5, replica_again=True), candidate()).may_be_exact
    # It is that snapshot's KV, and not another one's.
    assert chosen(account(held_kv=False, stored_kv_len=7, replica_again=True), candidate()).may_be_exact


def test_another_key_gets_no_kv_and_the_differing_field_is_named() -> None:
    found = chosen(account(stored_kv_len=8), candidate(key=key(dtype="other")))
    assert (found.tier, found.outputs) == (Tier.JOURNAL, (1, 2, 3, 4))
    assert "dtype" in found.detail


def test_another_model_or_tokenizer_never_continues_a_text() -> None:
    for field in ("model", "tokenizer"):
        assert plan(account(), [candidate(key=key(**{field: "other"}))]) is None


def test_what_some_rank_had_not_committed_is_not_taken_from_the_pool_but_regenerated() -> None:
    behind = account(held_outputs=3)
    in_place = candidate("w0", epoch=2, adopted=("w0", 1))
    for found in (chosen(behind, candidate()), chosen(behind, in_place)):
        # The blocks of one step fewer lie in the pool all the same, and are copied within it.
        assert (found.tier, found.outputs, found.expected) == (Tier.HELD, (1, 2, 3), (1, 2, 3, 4))
        assert "not committed the same step" in found.detail
    # What a client has beyond that comes out again.
    assert chosen(account(held_outputs=1), candidate()).outputs == (1,)


def test_ranks_that_have_nothing_in_common_are_told_where_the_kv_is_not_used() -> None:
    found = chosen(account(held_kv=False, held_outputs=0), candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.JOURNAL, (1, 2, 3, 4), (1, 2, 3, 4))
    assert "not committed the same step" in found.detail
    # A snapshot was taken of what they had in common then.
    assert chosen(account(held_kv=False, held_outputs=0, stored_kv_len=7), candidate()).tier is Tier.DISK


def test_where_all_ranks_have_committed_everything_nothing_is_different() -> None:
    for held in (None, 4, 9):
        found = chosen(account(held_outputs=held), candidate("w0", epoch=2, adopted=("w0", 1)))
        assert (found.tier, found.outputs, found.detail) == (Tier.IN_PLACE, (1, 2, 3, 4), "")


def test_an_answer_that_is_complete_is_ended_without_computing_anything() -> None:
    for known in (account(finish="stop"), account(output_max=4), account(output_max=3)):
        found = chosen(known, candidate())
        assert (found.tier, found.outputs, found.kv) == (Tier.JOURNAL, (1, 2, 3, 4), KvSource.NONE)
        assert found.finish == ("stop" if known.finish else "length")


def test_an_abort_is_no_ending() -> None:
    for finish in ("abort", "error", "banana"):
        assert chosen(account(finish=finish), candidate()).finish == ""


def test_logprobs_that_nobody_got_are_computed_again() -> None:
    found = chosen(account(wants_logprobs=True), candidate("w0", epoch=2, adopted=("w0", 1)))
    assert (found.tier, found.outputs, found.expected) == (Tier.HELD, (1, 2), (1, 2, 3, 4))


def test_a_complete_answer_whose_logprobs_nobody_got_is_not_made_up() -> None:
    found = chosen(account(wants_logprobs=True, finish="stop", held_kv=False), candidate())
    assert (found.tier, found.outputs, found.finish) == (Tier.JOURNAL, (1, 2), "")
    whole = chosen(account(wants_logprobs=True, finish="stop", delivered=(1, 2, 3, 4)), candidate())
    assert whole.finish == "stop"


def test_an_unstreamed_answer_with_logprobs_is_run_again() -> None:
    found = chosen(account(wants_logprobs=True, streamed=False, delivered=()), candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.NONE, (), ())


def test_what_the_client_has_decides_when_the_journal_contradicts_it() -> None:
    found = chosen(account(journal=(1, 9, 3)), candidate())
    assert (found.tier, found.outputs, found.expected) == (Tier.JOURNAL, (1, 2), (1, 2))


def test_an_engine_without_the_plugin_must_only_repeat_what_the_client_has() -> None:
    bare = candidate(key=None)
    for known in (account(), account(finish="stop"), account(journal=(1, 9))):
        found = chosen(known, bare)
        assert (found.tier, found.outputs, found.expected) == (Tier.NONE, (), (1, 2))


def test_a_session_of_which_nobody_saw_anything_is_not_refused_for_its_journal() -> None:
    for finish in ("", "stop"):
        found = chosen(account(delivered=(), finish=finish), candidate(key=None), without_kv=True)
        assert (found.tier, found.expected) == (Tier.NONE, ())


def test_a_pool_that_lacks_what_the_client_has_is_not_used() -> None:
    assert chosen(account(journal=(1,)), candidate()).tier is Tier.JOURNAL


def test_the_roomiest_worker_is_taken() -> None:
    full, half, small = (
        candidate("w1", sessions=8),
        candidate("w2", sessions=4),
        candidate("w3", sessions=0, sessions_max=2),
    )
    assert chosen(account(), full, half, small).candidate is half


tokens = st.integers(0, 3)
keys = st.sampled_from([None, KEY, key(dtype="other"), key(model="other"), key(extra="1")])
epochs = st.tuples(st.sampled_from(["w0", "w1"]), st.integers(1, 3))
candidates = st.builds(
    Candidate,
    worker=st.sampled_from(["w0", "w1", "w2"]),
    epoch=st.integers(1, 3),
    key=keys,
    sessions=st.integers(0, 4),
    sessions_max=st.integers(1, 4),
    adopted=st.none() | epochs,
)


@st.composite
def accounts(draw: st.DrawFn) -> Account:
    whole = draw(st.lists(tokens, max_size=6))
    journal, delivered = whole[: draw(st.integers(0, 6))], whole[: draw(st.integers(0, 6))]
    if draw(st.booleans()):
        journal = draw(st.lists(tokens, max_size=6))
    return Account(
        journal=tuple(journal),
        delivered=tuple(delivered),
        prompt_len=draw(st.integers(1, 4)),
        finish=draw(st.sampled_from(["", "", "stop", "length", "abort", "error"])),
        output_max=draw(st.none() | st.integers(1, 8)),
        wants_logprobs=draw(st.booleans()),
        streamed=draw(st.booleans()),
        held_kv=draw(st.booleans()),
        stored_kv_len=draw(st.integers(0, 10)),
        epoch=draw(epochs),
        key=draw(keys),
        held_outputs=draw(st.none() | st.integers(0, 6)),
        kept_kv_len=draw(st.integers(0, 10)),
        replica_kv_len=draw(st.integers(0, 10)),
    )


def begins(longer: tuple[int, ...], shorter: tuple[int, ...]) -> bool:
    return longer[: len(shorter)] == shorter


@given(accounts(), st.lists(candidates, max_size=4), st.booleans())
def test_whatever_is_chosen_loses_nothing_and_uses_no_foreign_kv(
    known: Account, ready: list[Candidate], without_kv: bool
) -> None:
    found = plan(known, ready, without_kv=without_kv)
    able = [c for c in ready if c.key is None or known.key is None or not _other_text(known.key, c.key)]
    # Refused only where no worker runs the same model.
    assert (found is None) == (not able)
    if found is None:
        return
    assert found.candidate in able
    assert begins(found.expected, known.delivered)
    assert begins(found.expected, found.outputs)
    outputs = known_outputs(known.journal, known.delivered)
    assert begins(outputs if outputs is not None else known.delivered, found.expected)
    if found.outputs or found.tier in KV_TIERS:
        assert found.outputs
        assert found.candidate.key is not None
    if found.tier in KV_TIERS:
        assert known.key is not None
        assert found.candidate.key is not None
        assert known.key.difference(found.candidate.key) == ()
        assert not without_kv
        assert not found.finish
        assert outputs is not None
    if found.tier in (Tier.HELD, Tier.IN_PLACE):
        assert known.held_kv
        assert begins(known.journal, found.outputs)
        assert known.held_outputs is None or len(found.outputs) <= known.held_outputs
    if found.tier is Tier.IN_PLACE:
        assert found.candidate.adopted == known.epoch
        assert found.outputs == found.expected
    if found.tier is Tier.DISK:
        assert known.prompt_len + len(found.outputs) - 1 <= known.stored_kv_len
    if found.tier is Tier.MEMORY:
        assert known.prompt_len + len(found.outputs) - 1 <= known.kept_kv_len
    if found.tier is Tier.REPLICA:
        assert known.prompt_len + len(found.outputs) - 1 <= known.replica_kv_len
    if found.finish:
        assert outputs == found.outputs
    if known.wants_logprobs and known.streamed and found.outputs:
        assert len(found.outputs) <= len(known.delivered)


@given(accounts(), st.lists(candidates, min_size=1, max_size=4))
def test_a_choice_does_not_depend_on_the_order_of_the_workers(known: Account, ready: list[Candidate]) -> None:
    assume(len({(c.worker, c.epoch) for c in ready}) == len(ready))
    assume(len({c.worker for c in ready}) == len(ready))
    assert plan(known, ready) == plan(known, ready[::-1])


def _other_text(one: CompatibilityKey, other: CompatibilityKey) -> bool:
    return bool({"model", "tokenizer"} & set(one.difference(other)))
