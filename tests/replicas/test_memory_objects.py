"""The table of bytes in a peer's memory: what is listed, and what that costs."""

import random
from typing import Any

from midstream.sidecar.replicas.memory_objects import MemoryObjects


def test_whatever_was_put_and_removed_each_prefix_lists_what_begins_with_it() -> None:
    chance = random.Random(7)
    for _ in range(200):
        objects, there = MemoryObjects(), dict[str, int]()
        for _ in range(40):
            name = "/".join(chance.choice("ab") for _ in range(chance.randint(1, 4))) + chance.choice(["", "x"])
            if chance.random() < 0.6:
                content = b"1" * chance.randint(0, 5)
                objects.put(name, content)
                there[name] = len(content)
            else:
                objects.remove([name])
                there.pop(name, None)
        for prefix in ("", "a", "a/", "a/b/", "b/a/a/", "b/a/a", "ax", "c/"):
            wanted = {name: size for name, size in there.items() if name.startswith(prefix)}
            assert objects.list(prefix, 100) == wanted, (prefix, there)
        objects.remove(list(there))
        assert not objects._folders
        assert not objects._within


def test_to_list_a_session_that_is_not_there_looks_at_nobody_elses_names() -> None:
    class Untouchable(dict[str, bytes]):
        def items(self) -> Any:
            raise AssertionError("walked")

    objects = MemoryObjects()
    objects.put("sessions/a/1", b"x")
    objects._folders["sessions/a"] = Untouchable(objects._folders["sessions/a"])
    assert objects.list("sessions/b/", 10) == {}
