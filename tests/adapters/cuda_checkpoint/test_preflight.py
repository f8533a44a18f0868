"""Each thing that a process is lost over, and that can be seen, is refused with its own word and a remedy."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.adapters.cuda_checkpoint.driver import About, Gpu, ProcessState
from midstream.adapters.cuda_checkpoint.preflight import (
    HOST_SPARE_BYTES,
    NCCL_OFF,
    Host,
    Rank,
    Reason,
    full_map,
    park_refusals,
    restore_refusals,
)

GIB = 1 << 30
A, B = (Gpu(name, "H200", 140 * GIB, 100 * GIB) for name in ("GPU-a", "GPU-b"))
HOST = Host(1000, About((580, 159)), (A, B), 64 * GIB)
RANK = Rank(7, 1000, ProcessState.RUNNING, {"GPU-a": 30 * GIB})
OTHER = replace(RANK, pid=8, held={"GPU-b": 30 * GIB})
PARKED = replace(RANK, state=ProcessState.CHECKPOINTED, held={})


def reasons(refusals: Any) -> set[Reason]:
    assert all(refusal.text for refusal in refusals)
    return {refusal.reason for refusal in refusals}


def test_a_process_with_nothing_in_its_way_is_not_refused() -> None:
    assert park_refusals(HOST, [RANK]) == ()
    assert restore_refusals(HOST, [PARKED], [{"GPU-a": 30 * GIB}], {}) == ()


@pytest.mark.parametrize(
    ("host", "rank", "reason"),
    [
        (replace(HOST, about=About((580,), ("cuCheckpointProcessLock",))), RANK, Reason.BINDINGS),
        (replace(HOST, about=About((550, 90))), RANK, Reason.DRIVER),
        (replace(HOST, about=About(())), RANK, Reason.DRIVER),
        (HOST, replace(RANK, uid=None, state=None), Reason.GONE),
        (HOST, replace(RANK, uid=0), Reason.USER),
        (replace(HOST, uid=0), RANK, Reason.USER),
        (HOST, replace(RANK, state=None), Reason.NOT_CUDA),
        (HOST, replace(RANK, state=ProcessState.LOCKED), Reason.STATE),
        (HOST, replace(RANK, state=ProcessState.FAILED), Reason.STATE),
        (replace(HOST, gpus=(replace(A, is_split=True), B)), RANK, Reason.MIG),
        (replace(HOST, gpus=(replace(A, served=frozenset({7})), B)), RANK, Reason.MPS),
        (replace(HOST, free_bytes=30 * GIB + HOST_SPARE_BYTES - 1), RANK, Reason.HOST_MEMORY),
        # What the driver does not tell of is taken to be all that is in use.
        (replace(HOST, free_bytes=80 * GIB), replace(RANK, held={}), Reason.HOST_MEMORY),
    ],
)
def test_each_refusal_has_its_word(host: Host, rank: Rank, reason: Reason) -> None:
    assert reasons(park_refusals(host, [rank])) == {reason}


def test_a_group_is_to_be_without_p2p_from_its_start() -> None:
    quiet = [replace(rank, environ=dict(NCCL_OFF)) for rank in (RANK, OTHER)]
    assert park_refusals(HOST, quiet) == ()
    assert reasons(park_refusals(HOST, [RANK, OTHER])) == {Reason.NCCL}
    peering = replace(quiet[0], held={"GPU-a": 29 * GIB, "GPU-b": GIB})
    assert reasons(park_refusals(HOST, [peering, quiet[1]])) == {Reason.PEERS}
    assert reasons(park_refusals(HOST, [replace(peering, environ={"NCCL_P2P_DISABLE": "0"})])) == set()


@pytest.mark.parametrize(
    ("host", "pairs", "reason"),
    [
        (replace(HOST, gpus=(replace(A, free_bytes=30 * GIB), B)), {}, Reason.GPU_MEMORY),
        (replace(HOST, gpus=(B,)), {}, Reason.MAP),
        (replace(HOST, gpus=(A, replace(B, is_split=True))), {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}, Reason.MIG),
        (replace(HOST, about=About((575, 1))), {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}, Reason.DRIVER),
    ],
)
def test_a_place_that_does_not_fit_is_refused_before_the_restore(
    host: Host, pairs: dict[str, str], reason: Reason
) -> None:
    assert reasons(restore_refusals(host, [PARKED], [{"GPU-a": 30 * GIB}], pairs)) == {reason}


def test_bindings_without_a_map_will_do_where_nothing_moves() -> None:
    older = replace(HOST, about=About((580, 159), ("CUcheckpointRestoreArgs",)))
    assert park_refusals(older, [RANK]) == ()
    needed = [{"GPU-a": 30 * GIB}]
    assert restore_refusals(older, [PARKED], needed, {}) == ()
    swapped = {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}
    assert reasons(restore_refusals(older, [PARKED], needed, swapped)) == {Reason.BINDINGS}


def test_two_ranks_that_come_back_on_one_gpu_need_room_for_both() -> None:
    pairs: dict[str, str] = {}
    needed = [{"GPU-a": 60 * GIB}, {"GPU-a": 60 * GIB}]
    found = restore_refusals(HOST, [PARKED, replace(PARKED, pid=8)], needed, pairs)
    assert reasons(found) == {Reason.GPU_MEMORY}


@given(st.integers(1, 8), st.data())
def test_a_map_names_every_gpu_once_on_both_sides(count: int, data: st.DataObject) -> None:
    gpus = [Gpu(f"GPU-{n}", "H200", 140, 100) for n in range(count)]
    names = [gpu.uuid for gpu in gpus]
    olds = data.draw(st.lists(st.sampled_from(names), unique=True))
    news = data.draw(st.permutations(names))[: len(olds)]
    moves = dict(zip(olds, news, strict=True))
    found = full_map(gpus, moves)
    if all(old == new for old, new in moves.items()):
        assert found == {}
        return
    assert sorted(found) == sorted(found.values()) == sorted(names)
    assert moves.items() <= found.items() | {(o, n) for o, n in moves.items() if o == n and found[o] == n}


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        ({"GPU-a": "GPU-z"}, Reason.MAP),
        ({"GPU-z": "GPU-a"}, Reason.MAP),
        ({"GPU-a": "GPU-c"}, Reason.KIND),
        ({"GPU-a": "GPU-d", "GPU-b": "GPU-d"}, Reason.MAP),
    ],
)
def test_a_map_that_cannot_be_is_said(moves: dict[str, str], reason: Reason) -> None:
    gpus = [A, B, replace(A, uuid="GPU-c", model="H100"), replace(A, uuid="GPU-d")]
    with pytest.raises(ValueError, match=f"^{reason.value}: "):
        full_map(gpus, moves)
