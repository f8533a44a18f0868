"""Which adapter a session's KV was computed with: its weights, not its name.

Owns the fingerprints of the adapters that this engine has loaded. They go into the prompt hash of a session, which is
compared wherever KV is offered: an engine without the adapter, or with other weights under its name, takes none.
Invariant: an adapter whose weights are not known for sure is equal to none, not even to itself in another engine.
"""

import hashlib
import secrets
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ..guard import guarded, patch
from ..weights import model_fingerprint

# More than any engine has loaded; beyond it the oldest are read again.
KNOWN_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Known:
    """What lay in a folder when it was loaded."""

    stamp: tuple[tuple[str, int, int], ...]
    fingerprint: str


_loaded: dict[tuple[int, str], _Known] = {}


def install() -> None:
    """Hook the loading of adapters in the engine core: a folder may change later, what was loaded does not."""
    from vllm.v1.engine.core import EngineCore

    patch(EngineCore, "add_lora", ("self", "lora_request"), _remembering)


def session_hash(prompt_hash: str, request: Any) -> str:
    """The hash of a prompt as a session's KV depends on it: with the adapter, where the request has one."""
    if request is None:
        return prompt_hash
    text = f"{prompt_hash}\0{fingerprint_of(request)}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def fingerprint_of(request: Any) -> str:
    """The weights of a request's adapter; a random word where the folder is not what it was, or is not one."""
    name = (int(request.lora_int_id), str(request.lora_path))
    known = _loaded.get(name) or _remember(request)
    if known is None or known.stamp != _stamp(_folder(request.lora_path)):
        return secrets.token_hex(16)
    return known.fingerprint


def _remembering(original: Any) -> Any:
    def add_lora(self: Any, lora_request: Any) -> Any:
        guarded(default=None)(_remember)(lora_request)
        return original(self, lora_request)

    return add_lora


def _remember(request: Any) -> _Known | None:
    folder = _folder(request.lora_path)
    stamp = _stamp(folder)
    if folder is None or stamp is None:
        return None
    known = _Known(stamp, model_fingerprint(folder))
    while len(_loaded) >= KNOWN_MAX:
        del _loaded[next(iter(_loaded))]
    _loaded[int(request.lora_int_id), str(request.lora_path)] = known
    return known


def _folder(path: str) -> Path | None:
    """Where an adapter lies; one of a hub in its cache, which is looked into and never filled."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        found = import_module("huggingface_hub").try_to_load_from_cache(path, "adapter_config.json")
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


def _stamp(folder: Path | None) -> tuple[tuple[str, int, int], ...] | None:
    """Names, sizes and times of a folder's files: what changes when somebody writes other weights there."""
    if folder is None:
        return None
    try:
        stats = sorted((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
    except OSError:
        return None
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
