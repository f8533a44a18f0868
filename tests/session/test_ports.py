"""Ports for servers of our own: free, and none that an outgoing connection may be given."""

import socket
from pathlib import Path

import pytest

from midstream.session import ports


def test_ports_are_free_differ_and_are_none_of_outgoing_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "range"
    told.write_text("20000\t60999\n")
    monkeypatch.setattr(ports, "_RANGE", told)
    found = ports.free_ports(32)
    assert len(set(found)) == 32
    assert not [port for port in found if 20_000 <= port <= 60_999]
    for port in found:
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_where_the_kernel_takes_all_of_them_for_connections_one_of_these_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "range"
    told.write_text("1024 65535")
    monkeypatch.setattr(ports, "_RANGE", told)
    assert ports.free_port() > 1024


@pytest.mark.parametrize("said", [None, "", "one two", "1 2 3"])
def test_where_the_kernel_does_not_say_its_default_counts(
    said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "range"
    if said is not None:
        told.write_text(said)
    monkeypatch.setattr(ports, "_RANGE", told)
    assert not 32_768 <= ports.free_port() <= 60_999


def test_a_port_that_somebody_has_is_not_free_and_one_that_was_just_left_is() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports.free_port()))
        server.listen()
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert not ports.is_free(port)
    assert ports.is_free(port)


def test_a_port_of_an_outgoing_connection_is_not_free() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            assert not ports.is_free(client.getsockname()[1])
