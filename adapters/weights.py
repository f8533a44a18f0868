"""What identifies a model on disk: the part of a compatibility key that every engine shares. Standard library only.

Reading whole checkpoints at each start would cost minutes for large models, so weights files are identified by size,
header and samples spread over the file; every small file is read whole.
"""

import hashlib
from pathlib import Path

SAMPLE_BYTES = 64 * 1024
SAMPLES = 64
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


def model_fingerprint(folder: Path) -> str:
    """32 hex digits over configuration and weights of a model folder; an OSError names a file that cannot be read."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.startswith(_TOKENIZER) or not path.is_file():
            continue
        if path.suffix in (*_WEIGHTS, ".json"):
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(_samples(path) if path.suffix in _WEIGHTS else path.read_bytes())
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """32 hex digits over the tokenizer's files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(_TOKENIZER) and path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _samples(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        for index in range(SAMPLES + 1):
            file.seek(max(0, min(size - SAMPLE_BYTES, index * (size // SAMPLES))))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
