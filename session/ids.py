"""Value types that name things.

A session id is 32 lower-case hex digits, drawn by the proxy; nothing that a client sends ever becomes one.
"""

import re
from typing import NewType

SessionId = NewType("SessionId", str)
WorkerName = NewType("WorkerName", str)
Generation = NewType("Generation", int)

_SESSION = re.compile(r"[0-9a-f]{32}")
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def session_id(text: str) -> SessionId:
    """Check and return a session id; ValueError names what is wrong with it."""
    if not _SESSION.fullmatch(text):
        raise ValueError(f"session id {text[:80]!r}: expected 32 lower-case hex digits")
    return SessionId(text)


def worker_name(text: str) -> WorkerName:
    """Check and return a worker name; it becomes part of file names, so separators are refused."""
    if not _WORKER.fullmatch(text):
        raise ValueError(
            f"worker name {text[:80]!r}: use 1 to 63 letters, digits, '.', '_' or '-', and begin with a letter or digit"
        )
    return WorkerName(text)
