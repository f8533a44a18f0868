"""The compatibility key: everything that must be equal for KV of one engine to be valid in another. Pure.

A key is a flat object of names and values that the engine's adapter fills in. There is no "close enough": any
difference, a field that only one side has included, makes a snapshot invalid there, and `difference` names it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

REQUIRED = (
    "engine",
    "engine_version",
    "device",
    "model",
    "tokenizer",
    "dtype",
    "kv_dtype",
    "kv_layout",
    "parallel",
)


@dataclass(frozen=True, slots=True)
class CompatibilityKey:
    """An engine's key. Values are strings, numbers or None."""

    fields: Mapping[str, str | int | float | None]

    @classmethod
    def from_json(cls, body: object) -> "CompatibilityKey":
        """Read a key; ValueError names what is missing or of the wrong kind."""
        if not isinstance(body, dict):
            raise ValueError(f"key: expected an object, got {type(body).__name__}")
        missing = [name for name in REQUIRED if not body.get(name)]
        if missing:
            raise ValueError(f"key: {', '.join(missing)} missing")
        wrong = [k for k, v in body.items() if not (v is None or isinstance(v, str | int | float))]
        if wrong:
            raise ValueError(f"key: {', '.join(map(str, wrong))} must be plain values")
        return cls(dict(body))

    def to_json(self) -> dict[str, Any]:
        """The key as a JSON object."""
        return dict(self.fields)

    def digest(self) -> str:
        """32 hex digits that two keys share when nothing differs: for lists of what is where, never for a restore."""
        text = json.dumps(dict(self.fields), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def difference(self, other: "CompatibilityKey") -> tuple[str, ...]:
        """Names of the fields that differ, in alphabetical order; empty when KV of one is valid in the other."""
        names = self.fields.keys() | other.fields.keys()
        absent = object()
        return tuple(sorted(n for n in names if self.fields.get(n, absent) != other.fields.get(n, absent)))
