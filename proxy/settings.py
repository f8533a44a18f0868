"""What can be set about the proxy, with its bounds. It reads no files: the daemon does."""

from dataclasses import dataclass, field

from .dialects.hiding import Hiding
from .policy import Policy
from .sse import BUFFER_BYTES_MAX
from .stall import StallPolicy


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Limits and habits of the proxy; every default is one to serve with."""

    body_bytes_max: int = 32 << 20
    # All bodies of open requests together: a session keeps its own until its end, to be able to send it again.
    bodies_bytes_max: int = 512 << 20
    # A client that sends only half of its body must not keep that half here for ever.
    body_timeout_s: float = 120.0
    answer_bytes_max: int = 256 << 20
    event_bytes_max: int = BUFFER_BYTES_MAX
    requests_max: int = 20_000
    # Choices of one request, each a session of its own and counted as a request.
    choices_max: int = 128
    connect_timeout_s: float = 5.0
    # How long an engine's pooled connection may lie idle; uvicorn closes its end after 5 s, so ours goes first.
    idle_connection_s: float = 4.0
    keepalive_first_s: float = 0.5
    keepalive_s: float = 5.0
    takeovers_max: int = 8
    # Of these, how many in a row that brought nothing new.
    fruitless_takeovers_max: int = 2
    # For requests that do not name a policy of their own.
    policy: Policy = Policy.BEST_EFFORT
    # A dying engine answers 5xx shortly before its process is gone: how long to wait for that news.
    error_grace_s: float = 0.25
    stall: StallPolicy = field(default_factory=StallPolicy)
    # Unseeded sampling cannot be continued exactly, because its random state dies with the worker.
    assign_seed: bool = True
    # What an engine sends in place of token ids that nobody asked for: vLLM null, others no such key.
    hiding: Hiding = Hiding.NULL
    # What the engine serves for its operator alone; clients get 404. One that ends in / stands for all below it.
    private_paths: frozenset[str] = frozenset()
    # How long a stream is kept without a reader; 0: it ends with its client's connection.
    reattach_s: float = 0.0
    # What is kept of one stream, and of all together; and how many are.
    reattach_stream_bytes_max: int = 1 << 20
    reattach_bytes_max: int = 256 << 20
    reattach_streams_max: int = 10_000

    def __post_init__(self) -> None:
        for name in (
            "body_bytes_max",
            "bodies_bytes_max",
            "body_timeout_s",
            "answer_bytes_max",
            "event_bytes_max",
            "requests_max",
            "choices_max",
            "connect_timeout_s",
            "idle_connection_s",
            "keepalive_first_s",
            "keepalive_s",
            "reattach_stream_bytes_max",
            "reattach_bytes_max",
            "reattach_streams_max",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"proxy setting {name}: expected a value above 0, got {getattr(self, name)}")
        for name in ("takeovers_max", "fruitless_takeovers_max", "error_grace_s", "reattach_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"proxy setting {name}: expected 0 or more, got {getattr(self, name)}")
