"""Clients of one gateway that come back to another one, with nothing but curl: real processes, a real etcd.

Their fleet has no secret: all that its members say to each other goes by TLS, and certificates prove it.
"""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from midstream.proxy.reattach_elsewhere import STREAMS_PATH
from midstream.session.ports import free_ports
from support.etcd_server import binary
from support.leased_nodes import LeasedFleet
from support.peers import make_fleet
from support.reconnecting import position_in, whole_events

pytestmark = [
    pytest.mark.service,
    pytest.mark.skipif(binary() is None, reason="MIDSTREAM_TEST_ETCD names no etcd"),
    pytest.mark.timeout(120),
]

BODY = json.dumps(
    {"model": "bench", "prompt": "x", "temperature": 0, "stream": True, "max_tokens": 150, "bench_gap_s": 0.02}
)
GATEWAYS = ("one", "other", "third", "ends")
KEPT = {"proxy.reattach_s": 30, "fleet.when_alone": "stop"}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeasedFleet]:
    folder = tmp_path_factory.mktemp("reattach")
    files = make_fleet(folder / "files", secret=None).files
    ports = dict(zip(("node", *GATEWAYS), free_ports(1 + len(GATEWAYS)), strict=True))

    def settings(name: str, **more: object) -> dict[str, object]:
        return {
            **KEPT, "fleet.secret_file": "null", "fleet.listen": f"127.0.0.1:{ports[name]}",
            "fleet.tls_cert": files.certificate, "fleet.tls_key": files.key, "fleet.tls_ca": files.ca, **more,
        }  # fmt: skip

    fleet = LeasedFleet(folder)
    try:
        fleet.node("node", settings("node"))
        for name in GATEWAYS:
            fleet.gateway(name, settings(name, **({"supervise.stop_timeout_s": 0.5} if name == "ends" else {})))
        fleet.listening("node", *GATEWAYS)
        deadline_s = time.monotonic() + 30
        for name in ("node", *GATEWAYS):
            while "joined as member=" not in fleet.log(name):
                assert time.monotonic() < deadline_s, fleet.log(name)
                time.sleep(0.05)
        for name in GATEWAYS:
            while curl(f"{fleet.urls[name]}/readyz", "-o", "/dev/null", "-w", "%{http_code}") != b"200":
                assert time.monotonic() < deadline_s, fleet.log(name)
                time.sleep(0.05)
        told = json.loads(curl(f"{fleet.urls['other']}/midstream/v1/status"))
        assert [node["url"] for node in told["nodes"]] == [f"https://127.0.0.1:{ports['node']}"]
        yield fleet
    finally:
        fleet.stop()


def curl(url: str, *words: str) -> bytes:
    """What curl prints; it may be cut off."""
    return subprocess.run(["curl", "-sN", url, *words], stdout=subprocess.PIPE, timeout=60, check=False).stdout


def cut_off(url: str, *words: str, after_bytes: int) -> bytes:
    """The whole events that a client keeps which is killed after so many bytes."""
    with subprocess.Popen(["curl", "-sN", url, *words], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        got = client.stdout.read(after_bytes)
        client.kill()
    return whole_events(got)


def token_in(events: bytes) -> str:
    """The name of the stream, from the ids of its events."""
    found = re.search(rb"^id: (.*)\.\d+$", events, re.MULTILINE)
    assert found is not None
    return found[1].decode()


def asked(fleet: LeasedFleet, name: str, have: bytes, body: str = BODY) -> bytes:
    """The same request again, at whichever that is."""
    last = f"Last-Event-ID: {token_in(have)}.{position_in(have)}"
    return curl(f"{fleet.urls[name]}/v1/completions", "-d", body, "-H", last)


def test_the_stream_of_one_gateway_goes_on_at_another_byte_for_byte(fleet: LeasedFleet) -> None:
    have = cut_off(f"{fleet.urls['one']}/v1/completions", "-d", BODY, after_bytes=9_000)
    token = token_in(have)
    # Cut off once more, at another gateway; then the rest, at that one by the request, and at a node by the name.
    path = f"{STREAMS_PATH}{token}?from={position_in(have)}"
    have += cut_off(fleet.urls["other"] + path, after_bytes=5_000)
    rest = asked(fleet, "other", have)
    at_node = curl(f"{fleet.urls['node']}{STREAMS_PATH}{token}?from={position_in(have)}")
    assert rest == at_node
    whole = curl(f"{fleet.urls['one']}{STREAMS_PATH}{token}?from=0")
    assert have + rest == whole
    assert whole.count(b'"text":') == 150
    assert b"data: [DONE]\n" in whole
    for name in ("one", "other", "node"):
        assert token not in fleet.log(name)


def test_it_is_given_up_through_another_gateway_as_well(fleet: LeasedFleet) -> None:
    long = BODY.replace("150", "3000")
    have = cut_off(f"{fleet.urls['one']}/v1/completions", "-d", long, after_bytes=3_000)
    url = f"{fleet.urls['other']}{STREAMS_PATH}{token_in(have)}"
    assert sessions_at_node(fleet) == 1
    assert curl(url, "-X", "DELETE", "-w", "%{http_code}") == b"204"
    # What its node has kept for the case that the gateway is lost goes with it, and the engine's work.
    deadline_s = time.monotonic() + 2
    while sessions_at_node(fleet):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert b"stream_gone" in asked(fleet, "other", have, long)


def test_a_gateway_that_was_stopped_says_nothing_more_of_a_stream_that_another_has_taken_up(fleet: LeasedFleet) -> None:
    long = BODY.replace("150", "400")
    with subprocess.Popen(
        ["curl", "-sN", f"{fleet.urls['third']}/v1/completions", "-d", long], stdout=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        first = client.stdout.read(9_000)
        fleet.signal("third", signal.SIGSTOP)
        have = whole_events(first)
        answer = until_reached(fleet, "other", have, long)
        fleet.signal("third", signal.SIGCONT)
        rest, code = client.stdout.read(), client.wait(20)
    whole = have + answer
    require_every_token_once(whole, 400)
    # It was broken off: what it had said before is a beginning of the one stream, and no end of it.
    assert code != 0
    assert whole.startswith(whole_events(first + rest))
    assert b"[DONE]" not in rest
    assert len(first + rest) < len(whole)


def test_a_gateway_that_is_told_to_end_leaves_its_streams_to_others(fleet: LeasedFleet) -> None:
    long = BODY.replace("150", "400")
    url = f"{fleet.urls['ends']}/v1/completions"
    have = cut_off(url, "-d", long, after_bytes=9_000)
    # One client has gone, another one reads until it is cut off.
    with subprocess.Popen(["curl", "-sN", url, "-d", long], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        first = client.stdout.read(9_000)
        fleet.signal("ends", signal.SIGTERM)
        read, code = whole_events(first + client.stdout.read()), client.wait(20)
    fleet.processes["ends"].wait(20)
    assert code != 0
    assert b"[DONE]" not in read
    # Nobody has to wait for its lease to be over.
    for events in (have, read):
        require_every_token_once(events + asked(fleet, "other", events, long), 400)


def test_the_streams_of_a_gateway_that_was_killed_go_on_at_others_byte_for_byte(fleet: LeasedFleet) -> None:
    have = cut_off(f"{fleet.urls['one']}/v1/completions", "-d", BODY, after_bytes=9_000)
    other_request = BODY.replace('"x"', '"y"')
    lost = cut_off(f"{fleet.urls['one']}/v1/completions", "-d", other_request, after_bytes=3_000)
    fleet.kill("one")
    # Until its lease is over nobody may say that nothing can come from it any more.
    assert json.loads(asked(fleet, "other", have))["error"]["code"] == "stream_out_of_reach"
    answer = until_reached(fleet, "other", have)
    whole = have + answer
    require_every_token_once(whole, 150)
    # It is a stream of that gateway now, where others find it.
    token = token_in(have)
    assert curl(f"{fleet.urls['other']}{STREAMS_PATH}{token}?from=0") == whole
    assert asked(fleet, "third", have) == answer
    assert token not in fleet.log("other") + fleet.log("node")
    # By its name alone, or with another request, nobody gets anything.
    assert b"stream_gone" in curl(f"{fleet.urls['third']}{STREAMS_PATH}{token_in(lost)}?from=0")
    assert b"stream_gone" in asked(fleet, "third", lost)


def sessions_at_node(fleet: LeasedFleet) -> int:
    """How many are in flight there."""
    return int(json.loads(curl(f"{fleet.urls['node']}/midstream/v1/status"))["sessions_open"])


def until_reached(fleet: LeasedFleet, name: str, have: bytes, body: str = BODY) -> bytes:
    """The rest of a stream, from a gateway that has to find it first."""
    deadline_s = time.monotonic() + 40
    while True:
        answer = asked(fleet, name, have, body)
        if b"stream_out_of_reach" not in answer:
            return answer
        assert time.monotonic() < deadline_s, fleet.log(name)
        time.sleep(0.3)


def require_every_token_once(stream: bytes, count: int) -> None:
    """It is whole, under numbers without a gap. Each token's text is when it was written."""
    assert numbers_in(stream) == list(range(1, len(numbers_in(stream)) + 1))
    written = [int(at) for at in re.findall(rb'"text":" (\d+)"', stream)]
    assert (len(written), written) == (count, sorted(set(written)))
    assert stream.count(b"data: [DONE]\n") == 1


def numbers_in(stream: bytes) -> list[int]:
    """Of its events."""
    return [int(number) for number in re.findall(rb"^id: .*\.(\d+)$", stream, re.MULTILINE)]
