"""Which headers travel."""

from multidict import CIMultiDict

from midstream.proxy import headers

CLIENT = CIMultiDict(
    [
        ("Host", "h"),
        ("Connection", "keep-alive, X-Secret-Hop"),
        ("Keep-Alive", "1"),
        ("Transfer-Encoding", "chunked"),
        ("X-Secret-Hop", "s"),
        ("Expect", "100-continue"),
        ("X-Request-Id", "outer"),
        ("Authorization", "Bearer t"),
        ("Accept-Encoding", "gzip"),
        ("Content-Length", "5"),
        ("Content-Type", "application/json; charset=utf-8"),
        ("Cookie", "a=1"),
        ("Cookie", "b=2"),
    ]
)


def test_hop_by_hop_headers_and_those_that_connection_names_stay_here() -> None:
    sent = headers.towards_engine(CLIENT)
    assert sorted(name for name, _ in sent.items()) == [
        "Accept-Encoding",
        "Authorization",
        "Content-Length",
        "Content-Type",
        "Cookie",
        "Cookie",
    ]


def test_a_sessions_request_is_json_that_comes_back_readable_under_the_inner_id() -> None:
    sent = headers.of_session(CLIENT, "f" * 32)
    assert sent["X-Request-Id"] == "f" * 32
    assert sent["Accept-Encoding"] == "identity"
    assert sent["Content-Type"] == "application/json"
    assert "Content-Length" not in sent
    assert sent.getall("Cookie") == ["a=1", "b=2"]


def test_the_client_gets_its_own_request_id_back_and_never_the_inner_one() -> None:
    answer = CIMultiDict({"X-Request-Id": "inner", "Content-Type": "text/event-stream", "Connection": "close"})
    assert headers.towards_client(answer, CLIENT) == {"Content-Type": "text/event-stream", "X-Request-Id": "outer"}
    assert "X-Request-Id" not in headers.towards_client(answer, CIMultiDict())
