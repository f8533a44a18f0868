"""Pages of the KV pool that are in nobody's hands but ours: awaited from the mover, or reserved for who comes back.

Owns which pages SGLang's allocator does not have although no request has them either. Invariant: such a page is in no
free list; so SGLang counts what is held here as held by sessions, and its own check of leaks covers it. Works on the
paged allocator by three of its parts: `free_pages`, `release_pages` and `free`.
"""

from collections.abc import Iterable, Sequence
from typing import Any


class Pages:
    """The pages that are held, over one allocator."""

    def __init__(self, allocator: Any, tree_cache: Any) -> None:
        self._allocator = allocator
        self._tree_cache = tree_cache
        self._held: set[int] = set()
        self.page_tokens = int(allocator.page_size)

    @property
    def held_tokens(self) -> int:
        """How many positions the held pages have room for."""
        return len(self._held) * self.page_tokens

    def take(self, count: int) -> list[int] | None:
        """Hold `count` free pages, those of the prefix cache too if need be; None while there are fewer."""
        wanted = count * self.page_tokens
        if self._allocator.available_size() < wanted:
            from sglang.srt.mem_cache.common import evict_from_tree_cache

            evict_from_tree_cache(self._tree_cache, wanted)
        slots = self._allocator.alloc(wanted)
        if slots is None:
            return None
        pages = [int(slot) // self.page_tokens for slot in slots[:: self.page_tokens].tolist()]
        self._held.update(pages)
        return pages

    def take_these(self, pages: Iterable[int]) -> bool:
        """Hold these very pages, if all of them are free or held already; False, and nothing is done, if not."""
        wanted = set(pages) - self._held
        free = self._free()
        if not wanted <= free:
            return False
        self._remove(wanted)
        self._held |= wanted
        return True

    def hand_over(self, pages: Sequence[int]) -> None:
        """A request owns these from now on."""
        self._held.difference_update(pages)

    def give_back(self, pages: Iterable[int]) -> None:
        """Nobody needs these: they are free again."""
        import torch

        mine = sorted(set(pages) & self._held)
        self._held.difference_update(mine)
        if mine:
            first = torch.tensor(mine, dtype=torch.int64, device=self._allocator.device) * self.page_tokens
            self._allocator.free(first)

    def keep_out(self) -> None:
        """The allocator has made a new list of free pages: take what is held out of it again."""
        self._remove(self._held)

    def _free(self) -> set[int]:
        return {*self._allocator.free_pages.tolist(), *self._allocator.release_pages.tolist()}

    def _remove(self, pages: set[int]) -> None:
        import torch

        if not pages:
            return
        gone = torch.tensor(sorted(pages), dtype=torch.int64, device=self._allocator.device)
        for name in ("free_pages", "release_pages"):
            there = getattr(self._allocator, name)
            setattr(self._allocator, name, there[~torch.isin(there, gone)])
