"""From gateway to node by TLS: real processes, an authority of the test's own, with the secret and without."""

import asyncio
import json
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from midstream.proxy.fleet import Unproven
from midstream.session.errors import ConfigError
from midstream.session.ports import free_ports
from midstream.sidecar.config import Fleet
from midstream.sidecar.fleet.proof import CertificateBeliever, CertificateProver
from midstream.sidecar.fleet_access import believer_of, is_in_a_fleet, node_url, prover_of
from midstream.sidecar.fleet_listener import listen_to_the_fleet
from support.leased_nodes import end_holders
from support.peers import make_fleet

BODY = {"model": "bench", "prompt": "x", "temperature": 0, "stream": True, "max_tokens": 40, "bench_gap_s": 0.005}
_START_S = 40.0


class Processes:
    """An engine, a node before it, and gateways."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[subprocess.Popen[bytes]] = []
        with (folder / "engine").open("wb") as out:
            argv = [sys.executable, "-m", "midstream.loadtest.proxy_bench_engine"]
            self._running.append(subprocess.Popen(argv, stdout=out))
        self.engine = self.read("engine", "http://").strip()

    def start(self, name: str, *words: str, **settings: object) -> str:
        """Start a sidecar or gateway; where it listens for clients."""
        sets = [word for key, value in settings.items() for word in ("--set", f"fleet.{key}={value}")]
        with (self.folder / name).open("wb") as log:
            argv = [sys.executable, "-m", "midstream.sidecar.cli", *words, *sets, "--port", "0"]
            self._running.append(subprocess.Popen(argv, stdout=log, stderr=log))
        return self.read(name, "event=listening url=").split("event=listening url=")[1].split()[0]

    def read(self, name: str, sign: str) -> str:
        deadline_s = time.monotonic() + _START_S
        while True:
            found = [line for line in (self.folder / name).read_text().splitlines() if sign in line]
            if found:
                return found[0]
            assert time.monotonic() < deadline_s, (self.folder / name).read_text()
            time.sleep(0.02)

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.wait(10)
        end_holders(self.folder)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    made.stop()


def certificates(folder: Path) -> dict[str, object]:
    """As settings."""
    files = make_fleet(folder, secret=None).files
    return {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.ca}


async def until_ready(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(20):
        while True:
            async with http.get(f"{url}/readyz") as answer:
                if answer.status == 200:
                    return
            await asyncio.sleep(0.05)


async def told(http: aiohttp.ClientSession, url: str, path: str = "/v1/completions") -> tuple[int, str]:
    async with http.post(url + path, json=BODY) as answer:
        return answer.status, await answer.text()


@pytest.mark.service
@pytest.mark.timeout(90)
async def test_certificates_alone_are_enough_and_without_one_nobody_gets_a_word(
    processes: Processes, tmp_path: Path
) -> None:
    of_fleet, of_others = certificates(tmp_path / "ours"), certificates(tmp_path / "theirs")
    [port] = free_ports(1)
    node, at = ["serve", "--state-dir", str(tmp_path / "s"), "--worker", f"w={processes.engine}"], f"127.0.0.1:{port}"
    clients = processes.start("node", *node, listen=at, **of_fleet)
    gateway = processes.start("gateway", "gateway", "--node", f"a=https://{at}", **of_fleet)
    stranger = processes.start("stranger", "gateway", "--node", f"a=https://{at}", **of_others)
    bare = processes.start("bare", "gateway", "--node", f"a={clients}", **of_fleet)
    async with aiohttp.ClientSession() as http:
        await until_ready(http, gateway)
        status, text = await told(http, gateway)
        assert (status, text.count('"text"')) == (200, BODY["max_tokens"])
        assert text.endswith("data: [DONE]\n\n")
        # What is no session goes the same way.
        async with http.post(f"{gateway}/tokenize", json=BODY) as answer:
            assert answer.status == 200
        # The port of clients knows nothing of certificates, and believes nobody; nor has it what is the fleet's.
        async with http.get(f"{clients}/midstream/v1/fleet/node") as answer:
            assert answer.status == 401
        said = {"X-Midstream-Fleet": "certificate"}
        async with http.get(f"{clients}/midstream/v1/fleet/node", headers=said) as answer:
            assert answer.status == 401
        for url, why in ((stranger, "CERTIFICATE_VERIFY_FAILED"), (bare, "believe")):
            async with asyncio.timeout(20):
                while True:
                    async with http.get(f"{url}/readyz") as answer:
                        assert answer.status == 503
                        if why in json.dumps((await answer.json())["troubles"]):
                            break
                    await asyncio.sleep(0.05)
        # Who trusts the node, and shows nothing, is refused in the handshake.
        silent = ssl.create_default_context(cafile=str(of_fleet["tls_ca"]))
        with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
            async with http.get(f"https://{at}/midstream/v1/fleet/node", ssl=silent) as answer:
                await answer.read()
        with pytest.raises(aiohttp.ClientError):
            async with http.get(f"http://{at}/live") as answer:
                await answer.read()


@pytest.mark.service
@pytest.mark.timeout(90)
async def test_with_a_secret_a_certificate_says_who_the_node_is_and_the_signature_who_asks(
    processes: Processes, tmp_path: Path
) -> None:
    made = certificates(tmp_path / "ours")
    [port] = free_ports(1)
    place, at = ["--state-dir", str(tmp_path / "s"), "--worker", f"w={processes.engine}"], f"127.0.0.1:{port}"
    for name in ("secret", "another"):
        (tmp_path / name).write_text(secrets.token_hex(32))
        (tmp_path / name).chmod(0o600)
    of_node: dict[str, Any] = {"tls_cert": made["tls_cert"], "tls_key": made["tls_key"]}
    processes.start("node", "serve", *place, listen=at, secret_file=tmp_path / "secret", **of_node)
    knows: dict[str, Any] = {"tls_ca": made["tls_ca"]}
    gateway = processes.start(
        "gateway", "gateway", "--node", f"a=https://{at}", secret_file=tmp_path / "secret", **knows
    )
    stranger = processes.start(
        "stranger", "gateway", "--node", f"a=https://{at}", secret_file=tmp_path / "another", **knows
    )
    async with aiohttp.ClientSession() as http:
        await until_ready(http, gateway)
        assert (await told(http, gateway))[0] == 200
        assert (await told(http, stranger))[0] == 503
    assert "why=it was signed with another secret" in (tmp_path / "node").read_text()


async def test_a_port_for_the_fleet_without_a_certificate_is_no_port() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.tls_cert"):
        await listen_to_the_fleet(None, Fleet(listen="127.0.0.1:8843"), 10)  # type: ignore[arg-type]


def test_what_is_configured_says_what_is_shown_and_believed(tmp_path: Path) -> None:
    settings = {name: str(value) for name, value in certificates(tmp_path / "ours").items()}
    fleet = Fleet(**settings)  # type: ignore[arg-type]
    assert is_in_a_fleet(fleet)
    assert isinstance(prover_of(fleet), CertificateProver)
    assert isinstance(believer_of(fleet), CertificateBeliever)
    proof = next(iter(prover_of(fleet).headers("GET", "/", b"").values()))
    CertificateBeliever().check("GET", "/", proof, shown=True).require(b"whatever it is")
    for wrong, shown in ((proof, False), ("", True)):
        with pytest.raises(Unproven):
            CertificateBeliever().check("GET", "/", wrong, shown=shown)
    assert (believer_of(Fleet()), is_in_a_fleet(Fleet())) == (None, False)
    with pytest.raises(ConfigError, match="secret"):
        prover_of(Fleet())
    with pytest.raises(ConfigError, match="who may ask"):
        believer_of(Fleet(tls_cert=settings["tls_cert"], tls_key=settings["tls_key"]))


def test_a_port_for_the_fleet_is_where_it_reaches_a_node() -> None:
    assert node_url(Fleet(listen="10.0.0.7:8843"), "0.0.0.0", "http://127.0.0.1:8800") == "https://10.0.0.7:8843"
    assert node_url(Fleet(listen="[fd00::7]:8843"), "::", "http://[::1]:8800") == "https://[fd00::7]:8843"
    with pytest.raises(ConfigError, match=r"fleet\.url"):
        node_url(Fleet(listen="0.0.0.0:8843", coordination="etcd"), "127.0.0.1", "http://127.0.0.1:8800")
