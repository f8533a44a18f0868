"""Pages as SGLang's paged allocator has them, for tests of who holds which."""

from collections.abc import Iterable, Sequence

from midstream.adapters.sglang.pages import Pages


class FakePages(Pages):
    """Free pages are a list; page 0 is nobody's."""

    def __init__(self, count: int, page_tokens: int = 4) -> None:
        self.free = list(range(1, count))
        self.page_tokens = page_tokens
        self._held: set[int] = set()

    @property
    def held(self) -> set[int]:
        return set(self._held)

    def take(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        self._held.update(taken)
        return taken

    def take_these(self, pages: Iterable[int]) -> bool:
        wanted = set(pages) - self._held
        if not wanted <= set(self.free):
            return False
        self.free = [page for page in self.free if page not in wanted]
        self._held |= wanted
        return True

    def give_back(self, pages: Iterable[int]) -> None:
        mine = sorted(set(pages) & self._held)
        self._held.difference_update(mine)
        assert not set(mine) & set(self.free), "freed twice"
        self.free += mine

    def hand_over(self, pages: Sequence[int]) -> None:
        assert set(pages) <= self._held
        self._held.difference_update(pages)
