"""Objects in Mooncake Store: memory of many nodes, reached over TCP or RDMA.

Owns the helper process (mooncake_helper.py) and its deadlines. Invariant: a call ends within its time, for a helper
that does not answer is killed, and the next call starts another; native code that crashes takes nothing with it. One
call at a time: the bytes of each go through one shared buffer. Mooncake evicts what it likes; who needs an object asks
whether it is there, which holds it for a lease (10 s by default).

Names cannot be listed by Mooncake's client. Its master's admin port can (`admin`), and is asked only to take stock.
"""

import contextlib
import json
import mmap
import os
import selectors
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from .contract import Refusal, ReplicaError

T = TypeVar("T")

BUFFER_BYTES = 72 << 20
LOCAL_BYTES = 16 << 20
START_S = 20.0
CALL_S = 10.0
BYTES_PER_S_MIN = 4 << 20
# A helper that cannot be started is not tried again at every call.
START_AGAIN_S = 1.0
KEYS_AT_ONCE = 4096
LISTING_BYTES_MAX = 64 << 20
LISTING_S = 10.0
LINE_BYTES_MAX = 8 << 20
_NOT_FOUND = -704
_NO_SPACE = -200
_NOT_MOVED = -800
_TOO_LARGE = -600


@dataclass(frozen=True, slots=True)
class Mooncake:
    """A deployment, and how this node takes part in it."""

    master: str
    metadata: str = "P2PHANDSHAKE"
    host: str = "127.0.0.1"
    protocol: str = "tcp"
    devices: str = ""
    segment_bytes: int = 0
    copies: int = 1
    admin: str | None = None
    python: Path = Path(sys.executable)


class MooncakeObjects:
    """See contract.Objects."""

    lists_folders = False

    def __init__(self, mooncake: Mooncake, *, call_s: float = CALL_S) -> None:
        self._mooncake = mooncake
        self._call_s = call_s
        self._turn = threading.Lock()
        self._helper: _HelperProcess | None = None
        self._not_before_s = 0.0
        self._is_closed = False

    def put(self, name: str, content: bytes) -> None:
        """See Objects.put."""
        self._put(name, content, pin=False)

    def replace(self, name: str, content: bytes) -> None:
        """See Objects.replace. Read back, for a name that was being written by who died is neither free nor there."""
        self.remove([name])
        self._put(name, content, pin=True)
        found = self.get(name, len(content))
        if found != content:
            raise ReplicaError(Refusal.BUSY, f"object {name}: it was not taken; its name may be free again later")

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """See Objects.get."""

        def bring(helper: "_HelperProcess") -> bytes | None:
            answer = helper.ask({"op": "get", "key": name, "max": bytes_max}, self._within_s(BUFFER_BYTES))
            size = int(answer["size"])
            if answer["code"] == _NOT_FOUND:
                return None
            self._check(answer, name)
            if size > min(bytes_max, BUFFER_BYTES):
                raise ReplicaError(Refusal.TOO_LARGE, f"object {name}: {size} bytes; {bytes_max} are taken")
            return helper.buffer[:size]

        return self._run(bring)

    def present(self, names: Collection[str]) -> frozenset[str]:
        """See Objects.present."""
        asked, there = list(names), set[str]()
        for at in range(0, len(asked), KEYS_AT_ONCE):
            keys = asked[at : at + KEYS_AT_ONCE]
            answer = self._ask({"op": "present", "keys": keys})
            self._check(answer, keys[0])
            there.update(key for key, is_there in zip(keys, answer["there"], strict=True) if is_there)
        return frozenset(there)

    def remove(self, names: Iterable[str]) -> None:
        """See Objects.remove."""
        every = list(names)
        for at in range(0, len(every), KEYS_AT_ONCE):
            keys = every[at : at + KEYS_AT_ONCE]
            answer = self._ask({"op": "remove", "keys": keys})
            self._check(answer, keys[0])

    def list(self, prefix: str, count_max: int) -> Mapping[str, int] | None:
        """See Objects.list. Only with the master's admin port, and while all that it names fits LISTING_BYTES_MAX."""
        if self._mooncake.admin is None:
            return None
        try:
            url = f"{self._mooncake.admin.rstrip('/')}/get_all_keys"
            with urllib.request.urlopen(url, timeout=LISTING_S) as answer:
                told = answer.read(LISTING_BYTES_MAX + 1)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ReplicaError(
                Refusal.UNREACHABLE, f"{self._mooncake.admin}: {error}; look at Mooncake's master"
            ) from error
        keys = [key for key in told.decode("utf-8", "replace").split("\n") if key.startswith(prefix)]
        if len(told) > LISTING_BYTES_MAX or len(keys) > count_max:
            return None
        found: dict[str, int] = {}
        for at in range(0, len(keys), KEYS_AT_ONCE):
            part = keys[at : at + KEYS_AT_ONCE]
            answer = self._ask({"op": "sizes", "keys": part})
            # One whose size is not told is gone by now, or is not there yet.
            found |= {key: size for key, size in zip(part, answer["sizes"], strict=True) if size >= 0}
        return found

    def close(self) -> None:
        """See Objects.close."""
        with self._turn:
            self._is_closed = True
            self._drop()

    # Inside

    def _put(self, name: str, content: bytes, *, pin: bool) -> None:
        if len(content) > BUFFER_BYTES:
            raise ReplicaError(Refusal.TOO_LARGE, f"object {name}: {len(content)} bytes; {BUFFER_BYTES} are taken")

        def put(helper: "_HelperProcess") -> dict[str, Any]:
            helper.buffer[: len(content)] = content
            asked = {"op": "put", "key": name, "size": len(content), "pin": pin}
            return helper.ask(asked, self._within_s(len(content)))

        self._check(self._run(put), name)

    def _check(self, answer: dict[str, Any], name: str) -> None:
        code = int(answer["code"])
        if code == 0:
            return
        if code == _NOT_MOVED:
            raise ReplicaError(
                Refusal.UNREACHABLE, f"object {name}: the node of Mooncake that lends its place does not answer"
            )
        if code == _NO_SPACE:
            raise ReplicaError(Refusal.FULL, f"object {name}: no node of Mooncake has room for it (code {code})")
        if code == _TOO_LARGE:
            raise ReplicaError(Refusal.TOO_LARGE, f"object {name}: larger than Mooncake takes (code {code})")
        raise ReplicaError(Refusal.UNREACHABLE, f"object {name}: Mooncake refused it (code {code}); look at its master")

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._run(lambda helper: helper.ask(message, self._call_s))

    def _run(self, call: Callable[["_HelperProcess"], T]) -> T:
        with self._turn:
            helper = self._opened()
            try:
                return call(helper)
            except _HelperLost as error:
                self._drop()
                raise ReplicaError(error.reason, f"Mooncake at {self._mooncake.master}: {error}") from error

    def _opened(self) -> "_HelperProcess":
        if self._is_closed:
            raise ReplicaError(Refusal.UNREACHABLE, "it was closed")
        if self._helper is not None:
            return self._helper
        if time.monotonic() < self._not_before_s:
            raise ReplicaError(Refusal.UNREACHABLE, f"Mooncake at {self._mooncake.master} was not there a moment ago")
        try:
            self._helper = self._started()
        except ReplicaError:
            # From when that was known: a master that hangs takes long to be found out.
            self._not_before_s = time.monotonic() + START_AGAIN_S
            raise
        return self._helper

    def _started(self) -> "_HelperProcess":
        helper = _HelperProcess(self._mooncake.python)
        try:
            config = self._mooncake
            answer = helper.ask(
                {
                    "op": "setup", "host": config.host, "metadata": config.metadata, "protocol": config.protocol,
                    "segment_bytes": config.segment_bytes, "local_bytes": LOCAL_BYTES, "devices": config.devices,
                    "master": config.master, "copies": config.copies,
                },
                START_S,
            )  # fmt: skip
        except _HelperLost as error:
            helper.close()
            raise ReplicaError(error.reason, f"Mooncake at {self._mooncake.master}: {error}") from error
        if answer["code"]:
            helper.close()
            raise ReplicaError(
                Refusal.UNREACHABLE,
                f"Mooncake's master at {self._mooncake.master} does not answer (code {answer['code']})",
            )
        return helper

    def _drop(self) -> None:
        if self._helper is not None:
            self._helper.close()
            self._helper = None

    def _within_s(self, size_bytes: int) -> float:
        return self._call_s + size_bytes / BYTES_PER_S_MIN


class _HelperLost(Exception):
    """The helper did not answer, or not as it should."""

    def __init__(self, reason: Refusal, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _HelperProcess:
    """One helper and the buffer that is shared with it."""

    def __init__(self, python: Path) -> None:
        descriptor = os.memfd_create("midstream-mooncake", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, BUFFER_BYTES)
            self.buffer = mmap.mmap(descriptor, BUFFER_BYTES)
            script = Path(__file__).with_name("mooncake_helper.py")
            # Mooncake logs each fault of its own at length; what matters comes as an answer.
            environ = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR", **os.environ}
            self._process = subprocess.Popen(
                [str(python), "-I", str(script), str(descriptor), str(BUFFER_BYTES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                bufsize=0,
                env=environ,
            )
        except OSError as error:
            raise ReplicaError(
                Refusal.UNREACHABLE, f"{python}: {error.strerror}; give the interpreter that has Mooncake installed"
            ) from error
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._read = bytearray()
        # One that does not read must not hold us either.
        os.set_blocking(self._input, False)
        os.set_blocking(self._output, False)

    def ask(self, message: dict[str, Any], within_s: float) -> dict[str, Any]:
        """The answer to one line. _HelperLost when there is none in time."""
        deadline = time.monotonic() + within_s
        rest = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while rest:
                self._wait(self._input, selectors.EVENT_WRITE, deadline)
                rest = rest[os.write(self._input, rest) :]
            while b"\n" not in self._read:
                self._wait(self._output, selectors.EVENT_READ, deadline)
                piece = os.read(self._output, 1 << 16)
                if not piece or len(self._read) > LINE_BYTES_MAX:
                    raise BrokenPipeError("no more of it")
                self._read += piece
        except OSError as error:
            raise _HelperLost(Refusal.UNREACHABLE, "its client ended; is mooncake installed there?") from error
        line, _, left = bytes(self._read).partition(b"\n")
        self._read = bytearray(left)
        answer = json.loads(line)
        if not answer.get("ok"):
            raise _HelperLost(Refusal.INTERNAL, str(answer.get("error")))
        return dict(answer)

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.buffer.close()

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, event)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise _HelperLost(Refusal.SLOW, "no answer in time; it was ended")
