"""How far each rank of an engine has come: its commit record, and the marks that say which step an output is of. Pure.

A step has one number on all ranks. A rank's record names the step up to which all of its KV is written, a session's
marks name the steps that produced its newest outputs; so an output's KV is complete where every rank's record has
reached that output's step. Invariant: a record or a mark that was torn, or is another's, is none; whatever is not known
counts as not done. Step numbers are u32 and go round: one that is half a round away counts as not reached.

Does not write (`arena_writer.py`, `commit_writer.py`), and does not know what a step computes.
"""

import struct
from collections.abc import Iterable, Mapping
from zlib import crc32

from .ids import SessionId
from .records import INBOX_BYTES, INBOX_OFFSET, SLOT_BYTES

RANKS_MAX = 32
COMMITS_OFFSET = 2048
# A cache line each, so that no rank waits for another's.
COMMIT_BYTES = 64
FIRST_STEP = 1
STEPS = 1 << 32

MARK_BYTES = 12
MARKS_OFFSET = INBOX_OFFSET + INBOX_BYTES
MARKS_MAX = (SLOT_BYTES - MARKS_OFFSET) // MARK_BYTES

_CELL = struct.Struct("<Q")
_COMMIT = struct.Struct("<8sII")
_COMMIT_KIND = b"MIDRANKS"
_MARK = struct.Struct("<III")
_MARK_BODY = struct.Struct("<II")
_MARK_OWNER = struct.Struct("<8s16sI")
_MARK_KIND = b"MIDMARKS"


def following(step: int) -> int:
    """The number of the step after `step`."""
    return (step + 1) % STEPS


def is_reached(step: int, commit: int) -> bool:
    """Whether a rank that has committed `commit` has done `step`."""
    return (commit - step) % STEPS < STEPS // 2


def commit_cell(rank: int, step: int) -> int:
    """A commit record as the one number of 8 bytes that it is: a processor or a GPU stores it at once, or not."""
    return step | crc32(_COMMIT.pack(_COMMIT_KIND, rank, step)) << 32


def commit_offset(rank: int, step: int) -> int:
    """Where in an arena the record of this step belongs: a rank has two, which are written in turn."""
    return COMMITS_OFFSET + rank * COMMIT_BYTES + (step & 1) * _CELL.size


def probe_offset(rank: int) -> int:
    """Where a rank may store a number, to see whether its stores arrive: beside its records, which nobody reads."""
    return COMMITS_OFFSET + rank * COMMIT_BYTES + 2 * _CELL.size


def newest_commit(rank: int, line: bytes) -> int | None:
    """The step that a rank's COMMIT_BYTES tell; None when they tell none."""
    steps: list[int] = []
    for (cell,) in _CELL.iter_unpack(line[: 2 * _CELL.size]):
        step = cell % STEPS
        if cell == commit_cell(rank, step):
            steps.append(step)
    if len(steps) < 2:
        return steps[0] if steps else None
    first, second = steps
    return first if is_reached(second, first) else second


def agreed_step(commits: Iterable[int | None]) -> int | None:
    """The newest step that all ranks have done; None when one of them tells nothing."""
    agreed: int | None = None
    for commit in commits:
        if commit is None:
            return None
        if agreed is None or is_reached(commit, agreed):
            agreed = commit
    return agreed


def mark_seed(session: SessionId, generation: int) -> int:
    """The check that those of a session's marks continue."""
    return crc32(_MARK_OWNER.pack(_MARK_KIND, bytes.fromhex(session), generation))


def encode_mark(seed: int, journal_len: int, step: int) -> bytes:
    """That the journal was so long after `step`."""
    return _MARK.pack(journal_len, step, crc32(_MARK_BODY.pack(journal_len, step), seed))


def mark_offset(journal_len: int) -> int:
    """Where in its slot a mark belongs: over the one of MARKS_MAX outputs before."""
    return MARKS_OFFSET + journal_len % MARKS_MAX * MARK_BYTES


def decode_marks(seed: int, marks: bytes) -> dict[int, int]:
    """The steps of a session's newest outputs, by the length of the journal with each of them."""
    found = {}
    for journal_len, step, check in _MARK.iter_unpack(marks[: MARKS_MAX * MARK_BYTES]):
        if check == crc32(_MARK_BODY.pack(journal_len, step), seed):
            found[journal_len] = step
    return found


def committed_len(journal_len: int, resumed: int, marks: Mapping[int, int], agreed: int | None) -> int:
    """How many of the journaled outputs are of steps that all ranks have done; re-entered ones are of none."""
    if journal_len <= resumed or agreed is None:
        return min(journal_len, resumed)
    done = (n for n, step in marks.items() if resumed < n <= journal_len and is_reached(step, agreed))
    return max(done, default=resumed)
