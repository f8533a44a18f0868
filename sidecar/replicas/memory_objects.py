"""Objects in this process's memory: what a peer keeps of others' snapshots.

Owns a table of bytes, by folder. Invariant: to list a folder that is not there, or has no folder within, costs no more
than what is in it, for restores and others' couriers ask for sessions that nobody has. Bounded by whoever stands before
it (object_store.py counts before it puts). Everything ends with the process: a peer that was started anew has nothing,
and says so.
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping


class MemoryObjects:
    """See contract.Objects."""

    lists_folders = True

    def __init__(self) -> None:
        self._folders: dict[str, dict[str, bytes]] = {}
        # How many folders are somewhere within another one.
        self._within: Counter[str] = Counter()
        self._mutex = threading.Lock()

    def put(self, name: str, content: bytes) -> None:
        """See Objects.put."""
        self.replace(name, content)

    def replace(self, name: str, content: bytes) -> None:
        """See Objects.replace."""
        with self._mutex:
            folder = _folder(name)
            if folder not in self._folders:
                self._folders[folder] = {}
                self._within.update(_above(folder))
            self._folders[folder][name] = content

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
                folder = _folder(name)
                inside = self._folders.get(folder)
                if inside is None:
                    continue
                inside.pop(name, None)
                if not inside:
                    del self._folders[folder]
                    self._within -= Counter(_above(folder))

    def list(self, prefix: str, count_max: int) -> Mapping[str, int] | None:
        """See Objects.list."""
        found: dict[str, int] = {}
        with self._mutex:
            for folder in self._folders if self._has_within(prefix) else [_folder(prefix)]:
                inside = self._folders.get(folder, {}) if _may_have(folder, prefix) else {}
                found |= {name: len(content) for name, content in inside.items() if name.startswith(prefix)}
        return found if len(found) <= count_max else None

    def close(self) -> None:
        """See Objects.close."""
        with self._mutex:
            self._folders.clear()
            self._within.clear()

    def _has_within(self, prefix: str) -> bool:
        """Whether there may be folders within what begins so."""
        return not prefix.endswith("/") or self._within[prefix[:-1]] > 0


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _above(folder: str) -> Iterator[str]:
    while folder:
        folder = _folder(folder)
        yield folder


def _may_have(folder: str, prefix: str) -> bool:
    """Whether names in that folder may begin so."""
    inside = f"{folder}/"
    return inside.startswith(prefix) or prefix.startswith(inside) or not folder
