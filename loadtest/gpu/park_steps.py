"""Single measurements of parking: `python -m midstream.loadtest.gpu.park_steps STEP --folder DIR ...`, a process each.

Owns what one step starts, which is ended with it. Figures are lines `figure {...}` on standard output (`parking.py`
reads them). Everything is parked by the command `midstream park`, as an operator does it, and what it says it took is
what is reported.
"""

import argparse
import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...session.errors import MidstreamError

GB = 10**9
GIB = 1 << 30
ANSWER_S = 120.0
HELPER = "midstream.adapters.cuda_checkpoint.helper"
# Machines whose memory grows as it is used say that less is free than there is.
PLENTY = 96 * GIB


def figure(name: str, value: float | None, unit: str = "", **more: Any) -> None:
    """One figure."""
    print("figure " + json.dumps({"name": name, "value": value, "unit": unit, **more}), flush=True)


class Target:
    """A process that is parked; its lines are JSON."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "midstream.loadtest.gpu.park_target", *words]
        self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self.line()

    @property
    def pid(self) -> int:
        """Its pid."""
        return self.popen.pid

    def line(self) -> dict[str, Any]:
        """Its next line. MidstreamError where it has ended."""
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        if not text:
            raise MidstreamError(f"the target has ended with {self.popen.wait(10)}")
        told: dict[str, Any] = json.loads(text)
        return told

    def ask(self, word: str) -> dict[str, Any]:
        """What it answers."""
        self.send(word)
        return self.line()

    def send(self, word: str) -> None:
        """Ask, and do not wait."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(word + "\n")
        self.popen.stdin.flush()

    def end(self) -> None:
        """Kill it."""
        self.popen.kill()
        self.popen.wait(30)


@contextlib.contextmanager
def target(*words: str) -> Iterator[Target]:
    """A target while this lasts."""
    made = Target(*words)
    try:
        yield made
    finally:
        made.end()


def command(folder: Path, *words: str, **settings: str) -> "subprocess.Popen[str]":
    """A command of midstream's, begun."""
    given = {"MIDSTREAM_STATE_DIR": str(folder / "state"), **settings}
    argv = [sys.executable, "-m", "midstream.sidecar.cli", *words, "--json"]
    return subprocess.Popen(
        argv, env={**os.environ, **given}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def told(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """What it came to; an error is told as it was said."""
    out, said = process.communicate(timeout=ANSWER_S)
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError:
        answer = {"ok": False, "state": "", "text": said.strip()[-500:], "seconds": {}}
    return answer


def park(folder: Path, pid: int, **settings: str) -> dict[str, Any]:
    """Park a process."""
    return told(command(folder, "park", str(pid), "--host-memory", str(PLENTY), **settings))


def unpark(folder: Path, pid: int) -> dict[str, Any]:
    """Bring it back."""
    return told(command(folder, "unpark", str(pid)))


def required(answer: dict[str, Any]) -> dict[str, float]:
    """The seconds of each state. MidstreamError where it did not come there."""
    if not answer["ok"]:
        raise MidstreamError(f"{answer['state']}: {answer['text']}")
    seconds: dict[str, float] = answer["seconds"]
    return seconds


def free_bytes() -> int:
    """What is free on the first GPU."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)


# ---- steps


def about(folder: Path, _: Sequence[str]) -> None:
    """What there is: driver, bindings, calls, cards, huge pages."""
    from importlib import metadata

    helper = Helper(os.getpid())
    look = helper.ask("look")
    helper.end()
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    # Structures are for changing GPUs alone.
    lacking = sum(name.startswith("cu") for name in look["missing"])
    figure(
        "calls that parking needs and the bindings lack", lacking, "calls",
        missing=look["missing"], driver=look["driver"], bindings=metadata.version("cuda-bindings"), gpus=look["gpus"],
        huge_pages=pages.read_text().strip() if pages.exists() else "unknown",
    )  # fmt: skip


def train(folder: Path, words: Sequence[str]) -> None:
    """Losses of a loop that is parked in its midst, beside one that nobody disturbs."""
    steps = int(words[0])
    with target("train", str(steps), "0") as alone:
        wanted = [alone.line() for _ in range(steps)]
    # Slow enough that it is in its midst when the command has come up.
    with target("train", str(steps), "0.05") as disturbed:
        got = [disturbed.line() for _ in range(steps // 10)]
        there = required(park(folder, disturbed.pid))
        back = required(unpark(folder, disturbed.pid))
        got += [disturbed.line() for _ in range(steps - len(got))]
    differ = sum(a != b for a, b in zip(wanted, got, strict=True))
    figure("losses that differ after a park", differ, "steps", steps=steps, there=there, back=back)


def image(folder: Path, words: Sequence[str]) -> None:
    """An image of so many GiB, out and in; `ready`: as much host memory was touched just before."""
    gib, how = int(words[0]), words[1]
    before = free_bytes()
    with target("image", str(gib * GIB)) as held:
        held.ask("check")
        occupied = free_bytes()
        if how == "ready":
            _touch(gib * GIB)
        there = required(park(folder, held.pid))
        left = before - free_bytes()
        back = required(unpark(folder, held.pid))
        answer = held.ask("check")
    size = before - occupied
    name = f"{gib} GiB, host memory {how}"
    figure(f"out: {name}", size / there["checkpointing"] / GB, "GB/s", seconds=there, bytes=size)
    figure(f"in: {name}", size / back["restoring"] / GB, "GB/s", seconds=back)
    figure(f"VRAM that is not free while parked: {name}", left / (1 << 20), "MiB")
    figure(f"as it was, graph and generator too: {name}", int(answer["well"]), answer=answer)


def pool(folder: Path, words: Sequence[str]) -> None:
    """A pool whose descriptor a holder keeps, or its owner, or nobody: is VRAM free, is it one memory afterwards?"""
    from ...session import vram

    keeps = words[0]
    path = str(folder / "pool.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        before = free_bytes()
        with target("pool", str(4 * GIB), path) as owner:
            connection, _ = listener.accept()
            with connection:
                _, [fd], _, _ = socket.recv_fds(connection, 16, 1)
            owner.ask("fill 1")
            if keeps != "holder":
                os.close(fd)
            if keeps == "nobody":
                owner.ask("close")
            used = before - free_bytes()
            required(park(folder, owner.pid))
            parked = before - free_bytes()
            required(unpark(folder, owner.pid))
            intact = owner.ask("read")
            owner.ask("fill 2")
            more: dict[str, Any] = {}
            if keeps == "nobody":
                shared: float | None = None
            else:
                # Only now a context in this process: what was free would be less by it.
                from ...session.held import rescue

                seen = fd if keeps == "holder" else rescue(owner.pid, int(owner.ready["fd"]), "cuda:any")
                try:
                    mapping = vram.map_device_pool(seen, int(owner.ready["size"]), 0)
                except MidstreamError as error:
                    shared, more = 0, {"why": str(error)}
                else:
                    from .park_target import fill, first

                    sees = first(mapping.address)
                    fill(mapping.address, mapping.size_bytes, 3)
                    shared = int(sees == 2 and owner.ask("read")["first"] == 3)
                    more = {"seen": sees}
                    mapping.close()
                os.close(seen)
    name = f"descriptor kept by {keeps}"
    figure(f"held pool, VRAM in use while parked: {name}", parked / GIB, "GiB", used_before=round(used / GIB, 2))
    figure(f"held pool, owner's bytes are intact: {name}", int(intact["first"] == intact["last"] == 1))
    if shared is not None:
        figure(f"held pool, one memory after a restore: {name}", shared, **more)


def full(folder: Path, _: Sequence[str]) -> None:
    """A GPU that is full when the process is to come back: refused, intact, and back when there is room."""
    with target("image", str(4 * GIB)) as held:
        held.ask("check")
        required(park(folder, held.pid))
        with target("image", str((free_bytes() - 2 * GIB) // GIB * GIB)):
            refused = unpark(folder, held.pid)
        required(unpark(folder, held.pid))
        well = held.ask("check")["well"]
    figure("a full GPU is refused, and the process is intact", int(refused["state"] == "parked" and well), told=refused)


def busy(folder: Path, _: Sequence[str]) -> None:
    """A kernel that runs for longer than a lock may take: not parked, and it goes on."""
    with target("image", str(GIB)) as held:
        held.ask("check")
        held.ask("busy")
        began_s = time.monotonic()
        refused = park(folder, held.pid, MIDSTREAM_PARK_LOCK_S="1")
        took_s = time.monotonic() - began_s
        well = held.ask("check")["well"]
    figure("a long kernel refuses the lock, and goes on", int(refused["state"] == "running" and well), told=refused,
           seconds=round(took_s, 2))  # fmt: skip


def killed(folder: Path, words: Sequence[str]) -> None:
    """The helper, or the command with it, is killed within a call: what the driver says, and what becomes of it."""
    call, who = words
    with target("image", str(12 * GIB)) as held:
        held.ask("check")
        if call == "restore":
            required(park(folder, held.pid))
        begun = command(folder, "unpark", str(held.pid)) if call == "restore" else command(
            folder, "park", str(held.pid), "--host-memory", str(PLENTY)
        )  # fmt: skip
        state = "restoring" if call == "restore" else "checkpointing"
        _until(lambda: _journal(folder, held.pid) == state)
        time.sleep(0.3)
        for helper in _children(begun.pid):
            os.kill(helper, signal.SIGKILL)
        if who == "both":
            begun.kill()
        states = _states(held.pid, 8.0 if call == "checkpoint" else 4.0)
        outcome = told(begun) if who == "helper" else {"state": "killed", "text": ""}
        if outcome["state"] != "running":
            outcome = unpark(folder, held.pid)
        is_well = outcome["state"] == "running" and bool(held.ask("check")["well"])
        is_ended = outcome["state"] == "gone" and held.popen.wait(10) != 0
    name = f"{who} killed in a {call}"
    figure(f"{name}: intact, or ended in order", int(is_well or is_ended), intact=is_well, told=outcome, states=states)


STEPS: dict[str, Callable[[Path, Sequence[str]], None]] = {
    "about": about, "train": train, "image": image, "pool": pool, "full": full, "busy": busy, "killed": killed,
}  # fmt: skip


class Helper:
    """A helper that is asked directly, for what no command says."""

    def __init__(self, pid: int) -> None:
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        argv = [sys.executable, "-m", HELPER, "--pid", str(pid), "--started", started]
        self._popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._line()
        if not said.get("ready"):
            raise MidstreamError(f"no driver: {said.get('text', 'its helper does not start')}")

    def ask(self, op: str) -> dict[str, Any]:
        """What it answers."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps({"op": op, "deadline_s": 60}) + "\n")
        self._popen.stdin.flush()
        return self._line()

    def end(self) -> None:
        """End it."""
        self._popen.kill()
        self._popen.wait(10)

    def _line(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        answer: dict[str, Any] = json.loads(self._popen.stdout.readline() or "{}")
        return answer


def _states(pid: int, within_s: float) -> list[list[Any]]:
    """What the driver says of a process from now on: each change, when it was seen, and how long the answer took."""
    helper = Helper(pid)
    began_s = time.monotonic()
    seen: list[list[Any]] = []
    while time.monotonic() - began_s < within_s:
        asked_s = time.monotonic()
        answer = helper.ask("state")
        word = answer.get("state") or answer.get("code")
        if not seen or seen[-1][1] != word:
            seen.append([round(asked_s - began_s, 2), word, round(time.monotonic() - asked_s, 3)])
        if seen[-1][1] in ("checkpointed", "running") and time.monotonic() - began_s > 1.0:
            break
        time.sleep(0.05)
    helper.end()
    return seen


def _journal(folder: Path, pid: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(json.loads((folder / "state" / "parked" / f"pid-{pid}.json").read_text())["state"])
    return ""


def _children(pid: int) -> list[int]:
    return [int(c) for path in Path(f"/proc/{pid}/task").glob("*/children") for c in path.read_text().split()]


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + ANSWER_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise MidstreamError("it did not come to that in time")
        time.sleep(0.005)


def _touch(size_bytes: int) -> None:
    """Have the machine find so much memory, and give it back."""
    with mmap.mmap(-1, size_bytes) as area:
        for offset in range(0, size_bytes, mmap.PAGESIZE):
            area[offset] = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """One step."""
    parser = argparse.ArgumentParser(prog="midstream.loadtest.gpu.park_steps")
    parser.add_argument("step", choices=sorted(STEPS))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    STEPS[options.step](options.folder, options.words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
