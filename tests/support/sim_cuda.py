"""A simulated CUDA driver for whole processes: real processes, real sockets, and the facts that were measured on H200s.

The server is what stands for the kernel's driver and the cards: it outlives helpers and keepers that are killed, and
goes on with a call whose asker is gone. `SimDriver` is the other end, in helpers; `SimProcess` is the library in a
process that "has CUDA". Kept to (docs/parking.md): a lock in vain leaves the process running; a map must name all GPUs,
else INVALID_VALUE and nothing is lost; out of memory at a restore loses the process for good; an open IPC mapping
checkpoints, and does not come back.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from midstream.adapters.cuda_checkpoint.driver import About, DriverError, Gpu, Held, ProcessState

VARIABLE = "MIDSTREAM_TEST_SIM_CUDA"
DRIVER = "support.sim_cuda:connect"
GPUS = ("GPU-0", "GPU-1")
TOTAL = 8 << 30


@dataclass
class Process:
    """A process as the driver sees it."""

    pid: int
    wire: "Wire"
    held: dict[str, int]
    has_ipc: bool
    state: ProcessState = ProcessState.RUNNING
    is_broken: bool = False
    at_work: threading.Lock = field(default_factory=threading.Lock)


class Wire:
    """JSON lines over a socket; `ask` waits for the answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")

    def send(self, message: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self) -> dict[str, Any] | None:
        line = self._file.readline()
        return json.loads(line) if line else None

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        self.send(message)
        answer = self.receive()
        if answer is None:
            raise ConnectionError("the other end is gone")
        return answer


class SimCuda:
    """The driver and the cards. `slow[op]` is how long a call takes; `fail[op, pid]` the code that it comes back with.

    `stuck`: calls (op, pid) that never come back. `calls` is what was asked, in order.
    """

    def __init__(self, folder: Path, *, gpus: Mapping[str, int] | None = None) -> None:
        self.path = folder / "cuda.sock"
        self.total = dict(gpus or dict.fromkeys(GPUS, TOTAL))
        self.others: dict[str, int] = {}
        self.slow: dict[str, float] = {}
        self.fail: dict[tuple[str, int], str] = {}
        self.stuck: set[tuple[str, int]] = set()
        self.calls: list[tuple[str, int]] = []
        self.driver = (580, 159)
        self.missing: tuple[str, ...] = ()
        self.split: set[str] = set()
        self.processes: dict[int, Process] = {}
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._connections: list[socket.socket] = []

    def __enter__(self) -> "SimCuda":
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def free(self, uuid: str) -> int:
        """What is free on a card."""
        with self._lock:
            there = [p for p in self.processes.values() if p.state is not ProcessState.CHECKPOINTED]
            used = sum(p.held.get(uuid, 0) for p in there) + self.others.get(uuid, 0)
            return self.total[uuid] - used

    def state(self, pid: int) -> ProcessState | None:
        """The state of a process; None where there is none."""
        process = self.processes.get(pid)
        return None if process is None else process.state

    def wait_for(self, pid: int, state: ProcessState, within_s: float = 10.0) -> None:
        """Wait until a process is in a state."""
        wait_for(lambda: self.state(pid) is state, within_s, lambda: f"{pid} is {self.state(pid)}, not {state}")

    def wait_called(self, op: str, pid: int, within_s: float = 10.0) -> None:
        """Wait until a call was made."""
        wait_for(lambda: (op, pid) in self.calls, within_s, lambda: f"no {op} of {pid} in {self.calls}")

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        wire = Wire(connection)
        with contextlib.suppress(OSError, ValueError, ConnectionError):
            first = wire.receive()
            if first is None:
                return
            if first["op"] == "hello":
                pid = int(first["pid"])
                process = Process(pid, wire, {k: int(v) for k, v in first["held"].items()}, bool(first["ipc"]))
                self.processes[pid] = process
                wire.send({"ok": True})
                # Its end is the end of the connection, and frees what it had.
                gone = os.pidfd_open(pid)
                import select

                waiting = select.poll()
                waiting.register(gone, select.POLLIN)
                while not self._over.is_set() and not waiting.poll(50):
                    pass
                os.close(gone)
                self.processes.pop(pid, None)
                return
            request: dict[str, Any] | None = first
            while request is not None:
                try:
                    answer = {"ok": True, **self._done(request)}
                except DriverError as error:
                    answer = {"ok": False, "code": error.code, "text": f"the driver says {error.code}: {error}"}
                wire.send(answer)
                request = wire.receive()

    def _done(self, request: Mapping[str, Any]) -> dict[str, Any]:
        op, pid = request["op"], int(request.get("pid", 0))
        if op == "about":
            return {"driver": self.driver, "missing": self.missing}
        if op == "devices":
            return {"gpus": [[u, "SIM-H200", self.total[u], self.free(u), u in self.split] for u in self.total]}
        process = self.processes.get(pid)
        if op == "held":
            is_there = process is not None and process.state is not ProcessState.CHECKPOINTED
            return {"held": process.held if process is not None and is_there else {}}
        if process is None:
            raise DriverError("INVALID_VALUE", f"{pid} has no CUDA")
        if op == "state":
            return {"state": process.state.value}
        self.calls.append((op, pid))
        if (op, pid) in self.stuck:
            while (op, pid) in self.stuck and not self._over.wait(0.02):
                pass
            raise DriverError("UNKNOWN", "it was stuck")
        with process.at_work:
            return self._call(op, process, request)

    def _call(self, op: str, process: Process, request: Mapping[str, Any]) -> dict[str, Any]:
        needs = {
            "lock": ProcessState.RUNNING,
            "checkpoint": ProcessState.LOCKED,
            "restore": ProcessState.CHECKPOINTED,
            "unlock": ProcessState.LOCKED,
        }[op]
        if process.state is not needs:
            raise DriverError("ILLEGAL_STATE", f"it is {process.state}")
        self._over.wait(self.slow.get(op, 0.0))
        if code := self.fail.get((op, process.pid)):
            if op in ("checkpoint", "unlock"):
                process.state = ProcessState.FAILED
            process.is_broken |= op == "restore" and code != "INVALID_VALUE"
            raise DriverError(code, f"{op} came back with {code}")
        match op:
            case "lock":
                answer = process.wire.ask({"op": "lock", "timeout_s": int(request["timeout_ms"]) / 1000})
                if not answer["ok"]:
                    raise DriverError("NOT_READY", "a kernel runs")
                process.state = ProcessState.LOCKED
            case "checkpoint":
                process.wire.ask({"op": "out"})
                process.state = ProcessState.CHECKPOINTED
            case "restore":
                self._restore(process, dict(request["pairs"]))
            case "unlock":
                process.wire.ask({"op": "unlock"})
                process.state = ProcessState.RUNNING
        return {}

    def _restore(self, process: Process, pairs: dict[str, str]) -> None:
        if process.is_broken:
            raise DriverError("OPERATING_SYSTEM", "an earlier restore failed")
        if pairs and (set(pairs) != set(self.total) or set(pairs.values()) != set(self.total)):
            raise DriverError("INVALID_VALUE", "the map does not name every GPU")
        if process.has_ipc:
            process.is_broken = True
            raise DriverError("INVALID_VALUE", "there is a mapping of another process's")
        with self._lock:
            moved: dict[str, int] = {}
            for uuid, size in process.held.items():
                new = pairs.get(uuid, uuid)
                moved[new] = moved.get(new, 0) + size
            if any(size > self.free(uuid) for uuid, size in moved.items()):
                process.is_broken = True
                raise DriverError("OUT_OF_MEMORY", "the GPU is full")
            process.held = moved
            process.state = ProcessState.LOCKED
        process.wire.ask({"op": "in"})


class SimDriver:
    """The contract, asked of a SimCuda."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._wire = Wire(self._socket)

    def close(self) -> None:
        """Let go of the connection."""
        self._wire._file.close()
        self._socket.close()

    def about(self) -> About:
        """As the simulation says."""
        answer = self._ask("about", 0)
        return About(tuple(answer["driver"]), tuple(answer["missing"]))

    def devices(self) -> tuple[Gpu, ...]:
        """All cards."""
        return tuple(Gpu(*told) for told in self._ask("devices", 0)["gpus"])

    def held(self, pid: int) -> Held:
        """What it holds."""
        return Held(self._ask("held", pid)["held"])

    def state(self, pid: int) -> ProcessState:
        """Its state."""
        return ProcessState(self._ask("state", pid)["state"])

    def lock(self, pid: int, timeout_ms: int) -> None:
        """Lock."""
        self._ask("lock", pid, timeout_ms=timeout_ms)

    def checkpoint(self, pid: int) -> None:
        """Checkpoint."""
        self._ask("checkpoint", pid)

    def restore(self, pid: int, pairs: Mapping[str, str]) -> None:
        """Restore."""
        self._ask("restore", pid, pairs=dict(pairs))

    def unlock(self, pid: int) -> None:
        """Unlock."""
        self._ask("unlock", pid)

    def _ask(self, op: str, pid: int, **more: Any) -> dict[str, Any]:
        answer = self._wire.ask({"op": op, "pid": pid, **more})
        if not answer["ok"]:
            raise DriverError(answer["code"], answer["text"])
        return answer


def connect() -> SimDriver:
    """As helpers do it."""
    try:
        return SimDriver(os.environ[VARIABLE])
    except OSError as error:
        raise DriverError("NO_DRIVER", f"no simulated driver: {error}") from error


class SimProcess:
    """The CUDA library within a process: memory on a device, a thread of the driver's, and a gate before each call."""

    def __init__(self, path: str, held: Mapping[str, int], *, has_ipc: bool = False) -> None:
        self.device: dict[str, Any] = {}
        self._image: dict[str, Any] = {}
        self._gate = threading.Lock()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        self._wire = Wire(connection)
        self._wire.ask({"op": "hello", "pid": os.getpid(), "held": dict(held), "ipc": has_ipc})
        threading.Thread(target=self._driver, args=(connection,), daemon=True).start()

    @contextlib.contextmanager
    def call(self) -> Iterator[dict[str, Any]]:
        """A call of CUDA: waits while the process is locked."""
        with self._gate:
            yield self.device

    def _driver(self, _: socket.socket) -> None:
        while (request := self._wire.receive()) is not None:
            ok = True
            match request["op"]:
                case "lock":
                    ok = self._gate.acquire(timeout=request["timeout_s"])
                case "out":
                    self._image, self.device = self.device, {}
                case "in":
                    self.device, self._image = self._image, {}
                case "unlock":
                    self._gate.release()
            self._wire.send({"ok": ok})


def wait_for(condition: Callable[[], object], within_s: float, what: Callable[[], str]) -> None:
    """Wait until something holds. AssertionError says what does not."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.01)
