"""What is said between a store in a peer's memory and its clients: paths, bounds, and words for what went wrong. Pure.

    GET    /latest/<session>                  a manifest (session/manifest.py), or 404
    GET    /named/<session>/<snapshot>        the same
    GET    /chunks/<name>                     a chunk's stored bytes (session/chunk.py), or 404
    POST   /drafts/<draft>                    begin a snapshot; 32 hex digits that the client has drawn
    POST   /drafts/<draft>/keep               {"names": [...]} -> {"kept": [...]}
    PUT    /drafts/<draft>/chunks/<name>      stored bytes
    POST   /drafts/<draft>/publish            a manifest -> {"snapshot": name}
    DELETE /drafts/<draft>                    leave it
    GET    /list, /figures   POST /finish/<session>

All under BASE. Whatever is not 200 has {"reason": word, "error": text}.
"""

from ...session.errors import CorruptError, StoreError
from .contract import Refusal, ReplicaError

BASE = "/midstream/v1/replicas"
CHUNK_BODY_BYTES_MAX = 64 << 20
MANIFEST_BODY_BYTES_MAX = 64 << 20
NAMES_MAX = 65_536
# Each name with its quotes and its comma.
JSON_BODY_BYTES_MAX = NAMES_MAX * 36 + 64
ANSWER_BYTES_MAX = 64 << 20
# What is slower than this is taken for dead: a session that waits for it is better off computing.
BYTES_PER_S_MIN = 1 << 20
# A draft that nobody has used for so long was left by a client that is gone.
DRAFT_IDLE_S = 120.0

STATUS = {
    Refusal.REQUEST: 400,
    Refusal.UNAUTHORIZED: 401,
    Refusal.MISSING: 404,
    Refusal.SLOW: 408,
    Refusal.TOO_LARGE: 413,
    Refusal.CORRUPT: 422,
    Refusal.INTERNAL: 500,
    Refusal.UNREACHABLE: 502,
    Refusal.BUSY: 503,
    Refusal.FULL: 507,
}


def reason_of(error: StoreError) -> Refusal:
    """The word for what went wrong."""
    if isinstance(error, CorruptError):
        return Refusal.CORRUPT
    return error.reason if isinstance(error, ReplicaError) else Refusal.INTERNAL


def error_of(where: str, reason: object, text: object) -> StoreError:
    """An answer's refusal as an error of this side."""
    if reason == Refusal.CORRUPT.value:
        return CorruptError(f"{where}: {str(text)[:500]}")
    known = next((word for word in Refusal if word.value == reason), Refusal.INTERNAL)
    return ReplicaError(known, f"{where}: {str(text)[:500]}")
