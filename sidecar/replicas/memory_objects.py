"""Objects in this process's memory: what a peer keeps of others' snapshots.

Owns a table of bytes, by folder. Bounded by whoever stands before it (object_store.py counts before it puts).
Everything ends with the process: a peer that was started anew has nothing, and says so.
"""

import threading
from collections.abc import Collection, Iterable, Mapping


class MemoryObjects:
    """See contract.Objects."""

    lists_folders = True

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, bytes]] = {}
        self._mutex = threading.Lock()

    def put(self, name: str, content: bytes) -> None:
        """See Objects.put."""
        self.replace(name, content)

    def replace(self, name: str, content: bytes) -> None:
        """See Objects.replace."""
        with self._mutex:
            self._folders.setdefault(_folder(name), {})[name] = content

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """See Objects.get."""
        found = self._folders.get(_folder(name), {}).get(name)
        return None if found is None or len(found) > bytes_max else found

    def present(self, names: Collection[str]) -> frozenset[str]:
        """See Objects.present."""
        return frozenset(name for name in names if name in self._folders.get(_folder(name), ()))

    def remove(self, names: Iterable[str]) -> None:
        """See Objects.remove."""
        with self._mutex:
            for name in names:
                folder = self._folders.get(_folder(name), {})
                folder.pop(name, None)
                if not folder:
                    self._folders.pop(_folder(name), None)

    def list(self, prefix: str, count_max: int) -> Mapping[str, int] | None:
        """See Objects.list."""
        found: dict[str, int] = {}
        with self._mutex:
            inside = self._folders.get(prefix.removesuffix("/"))
            for folder in [inside] if inside is not None else self._folders.values():
                found |= {name: len(content) for name, content in folder.items() if name.startswith(prefix)}
        return found if len(found) <= count_max else None

    def close(self) -> None:
        """See Objects.close."""
        with self._mutex:
            self._folders.clear()


def _folder(name: str) -> str:
    return name.rpartition("/")[0]
