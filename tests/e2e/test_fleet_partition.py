"""The coordination service is split, with members on both sides: nobody is taken over from who can still send."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.etcd_server import VARIABLE, binary
from support.host_fleet import ETCD_PORT
from support.hosts import Host, Hosts, why_not

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]

LEASE_S = 5
START_S = 60.0
HERE = Path(__file__).parents[1]


class Cluster:
    """Three etcds, a member and somebody who watches it, each on a host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._folder = folder
        self.etcds = [hosts.add() for _ in range(3)]
        self.member_host, self.watcher_host = hosts.add(), hosts.add()
        peers = {f"etcd-{n}": f"http://{host.address}:{ETCD_PORT + 1}" for n, host in enumerate(self.etcds)}
        cluster = ",".join(f"{name}={url}" for name, url in peers.items())
        for (name, peer), host in zip(peers.items(), self.etcds, strict=True):
            own = f"http://{host.address}:{ETCD_PORT}"
            host.start(
                [
                    str(binary()), "--name", name, "--data-dir", str(folder / name),
                    "--listen-client-urls", own, "--advertise-client-urls", own, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
                ],
                log=folder / f"{name}.log",
            )  # fmt: skip

    def leader(self) -> Host:
        """Whose etcd leads, once there is one."""
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            for host in self.etcds:
                ask = "import sys, urllib.request as u; "
                ask += f"r = u.Request('http://{host.address}:{ETCD_PORT}/v3/maintenance/status', b'{{}}'); "
                ask += "sys.stdout.write(u.urlopen(r, timeout=1).read().decode())"
                told = host.run(sys.executable, "-c", ask)
                if told.returncode == 0:
                    status = json.loads(told.stdout)
                    if status.get("leader") == status["header"]["member_id"]:
                        return host
            time.sleep(0.1)
        raise AssertionError("the three etcds have no leader")

    def start(self, host: Host, program: str, etcds: Sequence[Host], *more: str) -> "subprocess.Popen[bytes]":
        """One of the programs of these tests, which asks these etcds in turn."""
        urls = ",".join(f"http://{etcd.address}:{ETCD_PORT}" for etcd in etcds)
        environ = {"PYTHONPATH": str(HERE)}
        return host.start([sys.executable, "-m", program, urls, *more], log=self.log(program), environ=environ)

    def log(self, program: str) -> Path:
        return self._folder / f"{program}.log"

    def said(self, program: str, word: str) -> list[float]:
        """When it has said a word so far."""
        found = [line.split() for line in self.log(program).read_text().splitlines()]
        return [float(parts[0]) for parts in found if len(parts) > 1 and parts[1] == word]

    def until_said(self, program: str, word: str, limit_s: float) -> float:
        """When it has said it first."""
        deadline_s = time.monotonic() + limit_s
        while not (found := self.said(program, word)):
            assert time.monotonic() < deadline_s, self.log(program).read_text()[-2000:]
            time.sleep(0.05)
        return found[0]


MEMBER, WATCHER = "support.fleet_member", "support.fleet_watcher"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    if binary() is None:
        pytest.skip(f"{VARIABLE} names no etcd; `make test` sets it")
    hosts = Hosts()
    try:
        yield Cluster(hosts, tmp_path)
    finally:
        hosts.close()


def test_a_member_left_with_the_old_leader_stops_before_the_others_say_that_it_is_over(cluster: Cluster) -> None:
    leader = cluster.leader()
    others = [host for host in cluster.etcds if host is not leader]
    # Each asks its own side first, as if it had chosen the nearest.
    cluster.start(cluster.member_host, MEMBER, [leader, *others], str(LEASE_S))
    cluster.start(cluster.watcher_host, WATCHER, [*others, leader])
    cluster.until_said(WATCHER, "there", START_S)
    cluster.until_said(MEMBER, "send", START_S)
    for host in (leader, cluster.member_host):
        host.cut_from(*others, cluster.watcher_host)
    cut_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    over_s = cluster.until_said(WATCHER, "over", 10 * LEASE_S)
    [fading_s] = cluster.said(WATCHER, "fading")
    last_s = max(cluster.said(MEMBER, "send"))
    print(
        f"service split, lease {LEASE_S} s: the member stopped {last_s - cut_s:.1f} s after it, "
        f"its lease was gone after {fading_s - cut_s:.1f} s, it was over after {over_s - cut_s:.1f} s"
    )
    assert cut_s < last_s < fading_s < over_s
    for host in (leader, cluster.member_host):
        host.heal_from(*others, cluster.watcher_host)
    # What it was is over for good: it is told so, and never sends under that name again.
    cluster.until_said(MEMBER, "lost", 4 * LEASE_S)
    assert max(cluster.said(MEMBER, "send")) == last_s


@pytest.mark.apart
def test_a_member_on_the_side_of_most_is_renewed_there_and_nobody_takes_it_for_lost(cluster: Cluster) -> None:
    leader = cluster.leader()
    others = [host for host in cluster.etcds if host is not leader]
    # It asks the one first that is about to be alone.
    cluster.start(cluster.member_host, MEMBER, [leader, *others], str(LEASE_S))
    cluster.start(cluster.watcher_host, WATCHER, [*others, leader])
    cluster.until_said(WATCHER, "there", START_S)
    cluster.until_said(MEMBER, "send", START_S)
    leader.cut()
    time.sleep(3 * LEASE_S)
    assert not cluster.said(WATCHER, "fading")
    assert not cluster.said(MEMBER, "lost")
    assert max(cluster.said(MEMBER, "send")) > time.clock_gettime(time.CLOCK_BOOTTIME) - 1
