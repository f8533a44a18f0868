"""Sockets to workers have the kernel ask whether their path is there; tests/e2e/test_fleet_cut.py cuts one."""

import socket
from contextlib import closing

from midstream.proxy.upstream_socket import HEARD_S, upstream_socket


def test_the_kernel_is_told_to_ask_and_when_to_give_up() -> None:
    [address] = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_STREAM)
    with closing(upstream_socket(address)) as made:
        assert not made.getblocking()
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, ask_s, count = (made.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle_s + ask_s * count == HEARD_S
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == HEARD_S * 1000
