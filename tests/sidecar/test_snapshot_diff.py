"""Two stored moments compared."""

from dataclasses import replace

from midstream.session.ids import SessionId
from midstream.session.manifest import Manifest
from midstream.sidecar.snapshot_diff import compare


def moment(outputs: tuple[int, ...], *chunks: str, key: str = "m") -> Manifest:
    """Three prompt tokens, blocks of four."""
    return Manifest(
        session=SessionId("5" * 32),
        generation=1,
        key={"model": key},
        fingerprint="f" * 32,
        block_tokens=4,
        block_bytes=100,
        prompt_len=3,
        prompt_hash="a" * 32,
        kv_len=2 + len(outputs),
        outputs=outputs,
        chunks=chunks,
        created_at=1.0,
    )


EARLY = moment((1, 2, 3, 4), "a", "b")
LATE = moment((1, 2, 3, 4, 5, 6, 7), "a", "B", "c")


def test_an_earlier_moment_of_the_same_run_is_told_as_that() -> None:
    found = compare(EARLY, LATE)
    assert found.same_run
    assert (found.common_outputs, found.first_other_output) == (4, 0)
    # The second block is not full in the earlier one: its bytes need not agree.
    assert (found.equal_blocks, found.comparable_blocks) == (1, 1)


def test_the_first_other_output_is_named() -> None:
    found = compare(LATE, moment((1, 2, 9, 4, 5, 6), "a", "x"))
    assert (found.common_outputs, found.first_other_output) == (2, 3)
    assert not found.same_run


def test_equal_tokens_with_other_kv_are_not_the_same_run() -> None:
    found = compare(LATE, moment((1, 2, 3, 4, 5, 6, 7), "x", "B", "c"))
    assert found.first_other_output == 0
    assert (found.equal_blocks, found.comparable_blocks) == (0, 2)
    assert not found.same_kv
    assert not found.same_run


def test_other_prompts_and_keys_are_named_and_no_block_is_compared_then() -> None:
    found = compare(LATE, replace(LATE, prompt_hash="b" * 32, key={"model": "n", "driver": "1"}))
    assert (found.same_prompt, found.key_differs_in) == (False, ("driver", "model"))
    assert found.comparable_blocks == 0
    assert not found.same_run
