"""A first cheap look at a machine: what midstream needs of its kernel, its packages and its GPU, and what is there.

Owns the list of needs. Each look is one line, and whatever a look fails with is said in it; nothing here starts an
engine. The GPU's part makes a pool in a process, kills it, and reads the pool in this one.
"""

import ctypes
import fcntl
import importlib.util
import mmap
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from ...session.held import HolderClient, create_host_pool, map_pool
from . import deaths
from .results import Results

PART = "probe"
POOL_BYTES = 256 << 20
WAIT_S = 30.0
PACKAGES = (
    "torch", "vllm", "transformers", "cuda-bindings", "cupy-cuda13x", "xgrammar", "aiohttp", "uvloop", "msgspec",
    "zstandard", "xxhash", "prometheus-client", "psutil", "typer", "rich", "PyYAML", "pytest", "pytest-asyncio",
    "pytest-timeout", "setproctitle",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_PIDFD_GETFD = 438


def measure(results: Results) -> None:
    """All looks; a need that is not met is a figure that misses its bar."""
    results.add(PART, "python", sys.version_info[0] + sys.version_info[1] / 100, told=sys.version.split()[0])
    results.add(PART, "kernel", None if not platform.release() else 1, told=platform.release(), cpus=os.cpu_count())
    for name in PACKAGES:
        try:
            results.add(PART, f"package {name}", 1, bar=1, at_least=True, version=metadata.version(name))
        except metadata.PackageNotFoundError:
            results.add(PART, f"package {name}", int(_is_there(name)), bar=1, at_least=True, version="unknown")
    for name, look in NEEDS:
        began_s = time.perf_counter()
        try:
            said = look()
            worked = 1
        except Exception as error:
            said, worked = f"{type(error).__name__}: {error}", 0
        took_ms = round(1000 * (time.perf_counter() - began_s), 3)
        results.add(PART, name, worked, bar=1, at_least=True, told=said, ms=took_ms)


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def _memfd() -> str:
    fd = create_host_pool(1 << 20)
    try:
        map_pool(fd, 1 << 20).close()
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        return "sealed, and mapped"
    finally:
        os.close(fd)


def _tmpfs() -> str:
    """An arena: allocated at creation, mapped, on a file system in memory."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, 1 << 20)
        with mmap.mmap(file.fileno(), 1 << 20) as view:
            view[:4] = b"here"
        stat = os.statvfs("/dev/shm")
        return f"{stat.f_bavail * stat.f_frsize >> 20} MiB free in /dev/shm"


def _flock() -> str:
    with tempfile.NamedTemporaryFile() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with Path(file.name).open() as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return "held against another"
    raise RuntimeError("a lock was given twice; two sidecars could take one state folder")


def _seqpacket() -> str:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(f"{folder}/s")
            server, _ = listener.accept()
            with server:
                raw = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                peer = int.from_bytes(raw[:4], sys.byteorder)
                if peer != os.getpid():
                    raise RuntimeError(f"SO_PEERCRED tells pid {peer}, not {os.getpid()}; holders refuse their clients")
                fd = os.memfd_create("probe")
                socket.send_fds(client, [b"x"], [fd])
                os.close(fd)
                _, fds, _, _ = socket.recv_fds(server, 16, 4, socket.MSG_CMSG_CLOEXEC)
                if len(fds) != 1:
                    raise RuntimeError("a descriptor was not passed on; pools cannot be held")
                os.close(fds[0])
    return "peer known, descriptor passed"


def _pidfd() -> str:
    """A death is told at once, and a signal through the descriptor reaches the process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    fd = os.pidfd_open(child.pid)
    try:
        poll = select.epoll()
        poll.register(fd, select.EPOLLIN)
        began_s = time.perf_counter()
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        found = poll.poll(5)
        took_ms = 1000 * (time.perf_counter() - began_s)
        poll.close()
        if not found:
            raise RuntimeError("a pidfd says nothing of a death; deaths are seen by looking")
        return f"death told after {took_ms:.1f} ms"
    finally:
        os.close(fd)
        child.kill()
        child.wait()


def _pidfd_getfd() -> str:
    """What a pool whose holder died is rescued by: another process's descriptor."""
    source = "import os, sys; fd = os.memfd_create('probe'); print(fd, flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        number = int(child.stdout.readline())
        pidfd = os.pidfd_open(child.pid)
        try:
            found = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, number, 0)
            if found < 0:
                raise OSError(ctypes.get_errno(), f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
            os.close(found)
        finally:
            os.close(pidfd)
        return "another's descriptor was taken"
    finally:
        child.kill()
        child.communicate()


def _death_signal() -> str:
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0) != 0:
        raise RuntimeError("no PR_SET_PDEATHSIG; helpers outlive a sidecar that is killed")
    return "there"


def _proc() -> str:
    """What processes are recognised by: start time, name, command line, namespace."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    name = Path("/proc/self/comm").read_text().strip()
    if int(fields[19]) <= 0:
        raise RuntimeError("/proc tells no start time; a pid that was given again would be taken for another")
    return f"started {fields[19]}, namespace {namespace}, name {name}"


def _process_title() -> str:
    """By its title an engine's core is found."""
    source = (
        "import setproctitle, sys; setproctitle.setproctitle('VLLM::EngineCore'); print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        import psutil

        process = psutil.Process(child.pid)
        words = [process.name(), *process.cmdline()]
        if not any("EngineCore" in word for word in words):
            raise RuntimeError(f"a process's title is not seen: {words}, exit status {child.poll()}")
        return f"seen as {words[:2]}"
    finally:
        child.kill()
        child.communicate()


def _gpu() -> str:
    query = "--query-gpu=name,uuid,driver_version,memory.total,memory.used"
    done = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=WAIT_S
    )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr).strip()[:300])
    return done.stdout.strip()


def _cuda() -> str:
    from ...session import vram

    count = vram.device_count()
    return ", ".join(vram.device_uuid(device) for device in range(count))


def _nvrtc() -> str:
    """What the mover's kernels are compiled by."""
    from cuda.bindings import nvrtc

    status, major, minor = nvrtc.nvrtcVersion()
    if int(status):
        raise RuntimeError(f"NVRTC: {status}")
    return f"{major}.{minor}"


_OWNER = """
import sys
from midstream.session import vram
from midstream.session.held import HolderClient
from midstream.session.layout import Plane, PoolLayout, PoolMeta, cuda_memory
from cuda.bindings import driver
pool = vram.create_device_pool(int(sys.argv[2]), 0)
with vram.current(0):
    assert int(driver.cuMemsetD32(pool.address, 0x12345678, pool.size_bytes // 4)[0]) == 0
    assert int(driver.cuCtxSynchronize()[0]) == 0
blocks = pool.size_bytes // 65536
layout = PoolLayout(blocks, 16, (Plane(0, 65536, 65536),))
owner = {"pid": __import__("os").getpid(), "fd": pool.fd}
meta = PoolMeta(pool.size_bytes, layout, layout.fingerprint(), owner, cuda_memory(vram.device_uuid(0)), "0" * 32)
HolderClient(sys.argv[1]).put("probe/1/0", pool.fd, meta.to_json())
print("put", flush=True)
sys.stdin.read()
"""


def _outlives() -> str:
    """A device pool whose maker is killed: a holder without CUDA keeps it, and this process reads it."""
    from cuda.bindings import driver

    from ...session import vram

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/holder.sock"
        holder = subprocess.Popen([sys.executable, "-m", "midstream.sidecar.holder", "--socket", path])
        owner: subprocess.Popen[bytes] | None = None
        try:
            client = HolderClient(path)
            _until(lambda: Path(path).exists(), holder)
            argv = [sys.executable, "-c", _OWNER, path, str(POOL_BYTES)]
            owner = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert owner.stdout is not None
            if owner.stdout.readline() != b"put\n":
                raise RuntimeError("the process that makes a pool has ended; see its error above")
            owner.kill()
            owner.wait()
            fd, meta = client.get("probe/1/0")
            began_s = time.perf_counter()
            mapping = vram.map_device_pool(fd, int(meta["size_bytes"]), 0)
            mapped_ms = 1000 * (time.perf_counter() - began_s)
            os.close(fd)
            last = bytearray(4)
            with vram.current(0):
                status = driver.cuMemcpyDtoH(last, mapping.address + mapping.size_bytes - 4, 4)[0]
            mapping.close()
            if int(status) or last != bytearray((0x78, 0x56, 0x34, 0x12)):
                raise RuntimeError(f"the bytes of the dead process's pool are not there: {last.hex()} ({status})")
            return f"bytes intact, mapped in {mapped_ms:.1f} ms, kind {_kind_of_descriptor(client)}"
        finally:
            for process in (owner, holder):
                if process is not None:
                    process.kill()
                    process.communicate()


def _kind_of_descriptor(client: HolderClient) -> str:
    fd, _ = client.get("probe/1/0")
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _until(condition: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"{process.args!r} did not come up")
        time.sleep(0.02)


NEEDS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("host pools (memfd with seals)", _memfd),
    ("arenas (tmpfs, fallocate, mmap)", _tmpfs),
    ("locks (flock)", _flock),
    ("descriptors over sockets (SEQPACKET, SO_PEERCRED, SCM_RIGHTS)", _seqpacket),
    ("deaths (pidfd)", _pidfd),
    ("deaths at once (lifeline)", deaths.on_the_host),
    ("rescue (pidfd_getfd)", _pidfd_getfd),
    ("helpers end with their parent (PDEATHSIG)", _death_signal),
    ("processes (/proc)", _proc),
    ("an engine's core is found by its title", _process_title),
    ("GPU", _gpu),
    ("CUDA bindings", _cuda),
    ("NVRTC", _nvrtc),
    ("a device pool outlives its maker", _outlives),
    ("deaths at once on a GPU (lifeline)", deaths.on_a_gpu),
)
