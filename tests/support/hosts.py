"""Several hosts on one machine: each a namespace of networks and processes, with a link to one switch.

Owns the namespaces, which have no names: each is held by a first process that reads a pipe of this one. So all that
runs on a host ends with the host, and all hosts end with this process, however it ends; nothing can be left behind. A
host's link can be cut in silence, from all others or from one of them, and healed; a host that is destroyed dies as a
whole, and nobody is told. Links that are slow, long or lossy are wires of ours (`host_wire.py`). Sockets of the test
itself are the switch's own (`connector`). It needs root and Linux; `why_not` says what is missing.
"""

import ctypes
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from support.host_wire import READY, Link

ADDRESSES = "10.77.0."
# Nobody on the switch has it: what is sent there is not heard.
_NOWHERE = "02:00:00:00:00:ff"
_FIRST = ("sh", "-c", "trap '' CHLD; exec cat > /dev/null")
_NAMESPACES = ("unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child=SIGKILL", "--")
_HOSTS_MAX = 100
_START_S = 10.0
_CLONE_NEWNET = 0x40000000
# Its own, and no port's: what comes from a port that is not the bridge's any more is for nobody.
_SWITCH = "02:00:00:00:00:01"


@functools.cache
def why_not() -> str:
    """Why there can be no hosts on this machine; empty where there can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {' and '.join(missing)}"
    if os.geteuid() != 0:
        return "hosts need root, for namespaces"
    try:
        Hosts().close()
    except (OSError, AssertionError) as error:
        return f"hosts need namespaces, a bridge and pairs of veth: {error}"
    return ""


class _Namespace:
    """Namespaces that live as long as the process that is the first in them."""

    def __init__(self) -> None:
        # Its own session, so that an interrupt from a terminal is this process's business alone.
        self._outer = subprocess.Popen(
            [*_NAMESPACES, *_FIRST], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self.pid = self._first()

    def _first(self) -> int:
        """The first process in it, as this one sees it."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            try:
                [pid] = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text().split()
                if Path(f"/proc/{pid}/comm").read_text() == "cat\n":
                    return int(pid)
            except (OSError, ValueError):
                if self._outer.poll() is not None:
                    break
            time.sleep(0.002)
        self._outer.kill()
        assert self._outer.stderr is not None
        told = self._outer.stderr.read().decode().strip()
        self.end()
        raise OSError(f"no namespaces: {told}")

    def enter(self, *, is_whole: bool) -> list[str]:
        """The beginning of a command that runs in its network, or, as a whole, among its processes, too."""
        return ["nsenter", "--target", str(self.pid), "--net", *(["--pid", "--mount"] if is_whole else []), "--"]

    def ip(self, *lines: str) -> None:
        """Change its network. Processes are named as this one sees them."""
        told = subprocess.run(
            [*self.enter(is_whole=False), "ip", "-batch", "-"], input="\n".join(lines), text=True, capture_output=True
        )
        if told.returncode:
            raise OSError(f"ip {lines}: {told.stderr.strip()}")

    def end(self) -> None:
        """SIGKILL to all in it, at once."""
        self._outer.kill()
        self._outer.wait(10)
        for pipe in (self._outer.stdin, self._outer.stderr):
            assert pipe is not None
            pipe.close()


class Host:
    """One host; made by `Hosts.add`."""

    def __init__(self, hosts: "Hosts", number: int, link: Link | None) -> None:
        self._switch = hosts.switch
        self.address = f"{ADDRESSES}{number}"
        self._port = f"port{number}"
        self._namespace = _Namespace()
        self._wire: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self.is_there = True
        try:
            if link is None:
                self._switch.ip(f"link add {self._port} type veth peer name eth0 netns {self._namespace.pid}")
            else:
                self._lay_wire(link)
            self._switch.ip(f"link set {self._port} master br0 up")
            self._namespace.ip("link set lo up", "link set eth0 up", f"address add {self.address}/24 dev eth0")
        except BaseException:
            self.close()
            raise

    # ---- what runs there

    def start(
        self, argv: Sequence[str], *, log: Path, environ: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """A process of this host, which ends with it at the latest; its output goes to `log`."""
        with log.open("ab") as sink:
            process = subprocess.Popen(
                [*self._namespace.enter(is_whole=True), *argv],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, **(environ or {})},
            )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, *argv: str, timeout_s: float = 30.0) -> "subprocess.CompletedProcess[str]":
        """A short command there."""
        whole = [*self._namespace.enter(is_whole=True), *argv]
        return subprocess.run(whole, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)

    def signal(self, started: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
        """To a process that `start` has started, and to none of its children."""
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        os.kill(int(children[0]), number)

    # ---- what befalls it

    def cut(self) -> None:
        """Nothing that is sent arrives here, or from here, from now on; nobody is told."""
        self._switch.ip(f"link set {self._port} nomaster")

    def heal(self) -> None:
        """Undo `cut`."""
        self._switch.ip(f"link set {self._port} master br0")

    def cut_from(self, *others: "Host") -> None:
        """The same between this host and these others."""
        self._neighbours(others, lambda host: f"replace {host.address} lladdr {_NOWHERE} nud permanent dev eth0")

    def heal_from(self, *others: "Host") -> None:
        """Undo `cut_from`."""
        self._neighbours(others, lambda host: f"del {host.address} dev eth0")

    def _neighbours(self, others: "Sequence[Host]", change: "Callable[[Host], str]") -> None:
        self._namespace.ip(*(f"neighbour {change(other)}" for other in others))
        for other in others:
            other._namespace.ip(f"neighbour {change(self)}")

    def change_link(self, link: Link) -> None:
        """Make the link another one; it has to be a wire."""
        assert self._wire is not None, f"{self.address} was added without a link"
        assert self._wire.stdin is not None
        self._wire.stdin.write(json.dumps(asdict(link)).encode() + b"\n")
        self._wire.stdin.flush()

    def destroy(self) -> None:
        """As if its power failed: it is cut, and all of it is gone."""
        self.cut()
        self.close()

    def close(self) -> None:
        """End all of it."""
        self.is_there = False
        self._namespace.end()
        for process in self._started:
            process.wait(10)
        if self._wire is not None:
            self._wire.kill()
            self._wire.wait(10)
            for pipe in (self._wire.stdin, self._wire.stdout):
                assert pipe is not None
                pipe.close()

    def _lay_wire(self, link: Link) -> None:
        self._wire = subprocess.Popen(
            [
                sys.executable, "-m", "support.host_wire",
                str(self._switch.pid), self._port, str(self._namespace.pid), "eth0",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[1],
        )  # fmt: skip
        assert self._wire.stdout is not None
        told = self._wire.stdout.readline().strip()
        if told != READY:
            raise OSError("no wire: the kernel has no TAP devices")
        self.change_link(link)


class Hosts:
    """A switch and the hosts on it."""

    def __init__(self) -> None:
        self.switch = _Namespace()
        self._hosts: list[Host] = []
        try:
            self.switch.ip(
                "link set lo up",
                f"link add br0 address {_SWITCH} type bridge",
                "link set br0 up",
                f"address add {ADDRESSES}1/24 dev br0",
            )
            # Nor does it answer at a port for the address of the bridge.
            with inside(self.switch.pid):
                Path("/proc/sys/net/ipv4/conf/all/arp_ignore").write_text("1")
        except BaseException:
            self.close()
            raise

    def add(self, link: Link | None = None) -> Host:
        """One more host; without a `link` it is as fast as the kernel."""
        number = len(self._hosts) + 2
        assert number < _HOSTS_MAX
        host = Host(self, number, link)
        self._hosts.append(host)
        return host

    def connector(self) -> aiohttp.TCPConnector:
        """For clients of this process: their connections begin at the switch."""
        return aiohttp.TCPConnector(limit=0, socket_factory=self._socket)

    def listens(self, host: Host, port: int) -> bool:
        """Whether somebody listens there."""
        with inside(self.switch.pid), socket.socket() as asking:
            asking.settimeout(1.0)
            return asking.connect_ex((host.address, port)) == 0

    def close(self) -> None:
        """End all of it."""
        for host in self._hosts:
            if host.is_there:
                host.close()
        self.switch.end()

    def _socket(self, address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        with inside(self.switch.pid):
            made = socket.socket(family, kind, protocol)
        made.setblocking(False)
        return made


@contextmanager
def inside(pid: int) -> Iterator[None]:
    """This thread is in a process's network while this lasts: sockets that are made there stay there."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            yield
        finally:
            _enter(home)
    finally:
        os.close(home)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
