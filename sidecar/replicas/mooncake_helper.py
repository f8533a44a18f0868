"""The one process that loads Mooncake's client: run as a script by the interpreter of Mooncake's environment.

Owns the native client, and the buffer that it shares with whoever started it. Invariant: one line in, one line out, in
order; bytes go through the shared buffer, never through the lines; a fault of the client's is an answer. It may be
killed at any time: that is how a call that never ends is ended. Standard library and mooncake only; imports nothing of
midstream's, which that environment does not have.

    argv: descriptor of the buffer, its size    lines: JSON, {"op": ...} -> {"ok": true, ...} or {"ok": false, ...}
"""

import ctypes
import json
import mmap
import os
import sys
import threading
import time
from typing import Any

# What the client says of an object that is not there.
NOT_FOUND = -704
ORPHAN_LOOK_S = 0.5


class Helper:
    """The client, by operations."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        from mooncake import store  # type: ignore[import-not-found, unused-ignore]

        self._module = store
        self._client = store.MooncakeDistributedStore()
        self._buffer = mmap.mmap(descriptor, size_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._size_bytes = size_bytes
        self._plain = self._pinned = None

    def setup(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Connect to the master. `segment_bytes`: memory that this process lends to all."""
        code = self._client.setup(
            asked["host"], asked["metadata"], asked["segment_bytes"], asked["local_bytes"], asked["protocol"],
            asked["devices"], asked["master"],
        )  # fmt: skip
        if code == 0:
            code = self._client.register_buffer(self._address, self._size_bytes)
        self._plain = self._config(asked["copies"], False)
        self._pinned = self._config(asked["copies"], True)
        return {"code": code}

    def put(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Put what is in the buffer. One that is there already is left as it is."""
        config = self._pinned if asked["pin"] else self._plain
        return {"code": self._client.put_from(asked["key"], self._address, asked["size"], config)}

    def get(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Bring an object into the buffer; `size` is its own, and nothing was brought if that is too much."""
        size = int(self._client.get_size(asked["key"]))
        if size < 0 or size > min(asked["max"], self._size_bytes):
            return {"code": 0 if size >= 0 else size, "size": max(size, 0)}
        code = int(self._client.get_into(asked["key"], self._address, size))
        return {"code": 0 if code == size else min(code, -1), "size": size}

    def present(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Which of the keys are there; asking holds them for the time of a lease."""
        codes = [int(code) for code in self._client.batch_is_exist(asked["keys"])]
        # Not to know is not to be without.
        return {"code": min([0, *codes]), "there": [code == 1 for code in codes]}

    def sizes(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The size of each object; negative where it is not there."""
        return {"code": 0, "sizes": [int(self._client.get_size(key)) for key in asked["keys"]]}

    def remove(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Remove objects, also such as somebody reads: readers check what they have read."""
        codes = [int(code) for code in self._client.batch_remove(asked["keys"], True)]
        return {"code": next((code for code in codes if code not in (0, NOT_FOUND)), 0)}

    def _config(self, copies: int, pin: bool) -> Any:
        config = self._module.ReplicateConfig()
        config.replica_num = copies
        # Versions before 0.3.13 have a switch instead of an action.
        if pin and hasattr(self._module, "SoftPinAction"):
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
        elif pin and hasattr(config, "with_soft_pin"):
            config.with_soft_pin = True
        return config


OPERATIONS = ("setup", "put", "get", "present", "sizes", "remove")


def end_with(parent: int) -> None:
    """End this process when its parent has ended, also while the client does not come back from a call."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_LOOK_S)
    os._exit(1)


def main() -> None:
    """Answer until there are no more lines."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever the client prints goes where errors go.
    os.dup2(2, 1)
    helper = Helper(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        try:
            asked = json.loads(line)
            if asked["op"] not in OPERATIONS:
                raise ValueError(f"unknown operation {asked['op']!r}")
            answer = {"ok": True, **getattr(helper, asked["op"])(asked)}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
    # The client's destructors may wait for a master that is gone.
    os._exit(0)


if __name__ == "__main__":
    main()
