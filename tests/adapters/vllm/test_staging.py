"""Long lists of token ids go to the GPU as arrays, and are the same there; there is memory for them from the start."""

import sys
import weakref
from array import array
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from midstream.adapters import guard
from midstream.adapters.vllm.staging import LONG, PINNED_BYTES, of_arrays, with_room

INT32, INT64, FLOAT = "int32", "int64", "float32"


def fromiter(data: list[int], dtype: str, count: int) -> "array[int]":
    """NumPy's, with arrays of Python's own."""
    assert len(data) == count
    return array(dtype, data)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used of its libraries, which are not installed here."""
    for name, parts in (
        ("torch", {"int32": INT32, "int64": INT64}),
        ("numpy", {"int32": "i", "int64": "q", "fromiter": fromiter}),
    ):
        module = ModuleType(name)
        vars(module).update(parts)
        monkeypatch.setitem(sys.modules, name, module)


class Given:
    """What vLLM's function was given."""

    def __init__(self) -> None:
        self.calls: list[SimpleNamespace] = []
        self.bring = of_arrays(self._original)

    def _original(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(SimpleNamespace(data=data, args=args, kwargs=kwargs))
        return data

    @property
    def last(self) -> Any:
        return self.calls[-1].data


@pytest.mark.parametrize(("dtype", "wanted"), [(INT32, "i"), (INT64, "q")])
def test_a_long_list_is_an_array_of_the_same_numbers(dtype: str, wanted: str) -> None:
    given, ids = Given(), list(range(LONG))
    given.bring(ids, device="cuda", dtype=dtype)
    assert given.last.typecode == wanted
    assert given.last.tolist() == ids
    given.bring(ids, "cuda", dtype)
    assert given.last.typecode == wanted


def test_whatever_else_there_is_goes_as_it_came() -> None:
    given = Given()
    for data, dtype in (([1] * (LONG - 1), INT32), ([0.5] * LONG, FLOAT), ("x" * LONG, INT32), ([1] * LONG, None)):
        given.bring(data, device="cuda", dtype=dtype)
        assert given.last is data


def test_numbers_that_do_not_fit_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    monkeypatch.setattr(guard, "_on_error", [lambda: errors.append("hook")])
    given, ids = Given(), [1 << 40] * LONG
    given.bring(ids, device="cuda", dtype=INT32)
    assert given.last is ids
    assert errors == ["hook"]


def test_memory_of_each_size_was_there_once_before_the_first_request() -> None:
    held: list[object] = []
    given_back: list[tuple[int, bool, str]] = []

    class Memory:
        def __init__(self, size: int, *, dtype: str, pin_memory: bool = False, device: str = "cpu") -> None:
            self.what = (size, pin_memory, device)
            held.append(self.what)
            weakref.finalize(self, given_back.append, self.what)

    vars(sys.modules["torch"]).update(uint8="uint8", empty=Memory)
    assert with_room(lambda engine: f"{engine} warmed up")("engine") == "engine warmed up"
    pinned = [size for size, is_pinned, device in given_back if is_pinned and device == "cpu"]
    assert sorted(pinned) == sorted(PINNED_BYTES * 2)
    assert [device for _, is_pinned, device in given_back if not is_pinned] == ["cuda"] * 2
    assert len(held) == len(given_back), "all of it was given back"


def test_where_there_is_no_memory_left_the_engine_starts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[str] = []
    monkeypatch.setattr(guard, "_on_error", [lambda: errors.append("hook")])

    def empty(*asked: object, **more: object) -> None:
        raise MemoryError("none left")

    vars(sys.modules["torch"]).update(uint8="uint8", empty=empty)
    assert with_room(lambda engine: "warmed up")("engine") == "warmed up"
    assert errors == ["hook"]
