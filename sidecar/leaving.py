"""What a sidecar leaves in its state folder when it ends: whatever is still of use to somebody, and nothing else.

Owns the decision and the removal. Invariants: the place that a living engine has claimed, and the holder that keeps its
pool, stay as they are; in the folder only what midstream makes there is removed, so that one with files of others in it
stays with those. Which epochs are of no use is `workers`' to know.
"""

import contextlib
import shutil
from pathlib import Path

from ..session.ticket import claimed_epoch

_WORKERS = "workers"
HOLDER = "holder.sock"
_FILES = ("url", "control.sock", "control.sock.lock", "mover.sock", "mover.sock.lock", "mover.sock.suspects")
_FOLDERS = ("plugin-*", ".plugin-*", _WORKERS)


def has_claimed_places(state: Path) -> bool:
    """Whether an engine that others started has its arena here, and may yet bring its pool."""
    folders = (state / _WORKERS).glob("*/")
    return any((folder / f"{claimed_epoch(folder)}.arena").exists() for folder in folders)


def tidy(state: Path) -> None:
    """Remove what midstream has made in the folder, but for its lock, unless a holder or an engine still needs it."""
    if (state / HOLDER).exists() or has_claimed_places(state):
        return
    for pattern in _FOLDERS:
        for folder in state.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)
    for name in (*_FILES, f"{HOLDER}.lock", f"{HOLDER}.log"):
        with contextlib.suppress(OSError):
            (state / name).unlink(missing_ok=True)
