"""Every metric once: name, labels, meaning.

Owns the registry; nothing else in midstream makes a metric. Invariant: label values come from closed sets or from the
names of configured workers, never from what a client sends, so the number of series is bounded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .cards.figures import CardFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAPS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RESTORES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LAGS_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_STATUS_FIELDS_MAX = 96


class Metrics:
    """The metrics of one sidecar, in a registry of their own."""

    def __init__(self) -> None:
        # A second series for each counter, which says when it was made, is of no use here.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._mover = _Status("mover")
        self._replicas = _Status("replicas")
        for status in (self._mover, self._replicas):
            self.registry.register(status)
        registry = self.registry
        self.cards = CardFigures()
        registry.register(self.cards)
        self.failovers = Counter(
            "midstream_failovers",
            "Interruptions of sessions: why, what they came to, and from which tier the KV was.",
            ("reason", "outcome", "tier"),
            registry=registry,
        )
        self.client_gap_s = Histogram(
            "midstream_client_gap_seconds",
            "From the interruption to the first new token that the client was sent.",
            buckets=_GAPS_S,
            registry=registry,
        )
        self.drain_pause_s = Histogram(
            "midstream_drain_pause_seconds",
            "Planned moves: how long a client was sent nothing, from the close of its gate to the next new token.",
            buckets=_GAPS_S,
            registry=registry,
        )
        self.drain_moves = Counter(
            "midstream_drain_moves",
            "Sessions of what drains: moved, or why not.",
            ("result",),
            registry=registry,
        )
        self.drain_left = Gauge(
            "midstream_drain_sessions_left",
            "Sessions that a drain still waits for; 0 where none is under way.",
            registry=registry,
        )
        self.restore_s = Histogram(
            "midstream_restore_seconds",
            "Time to bring the KV of one session into its new worker.",
            buckets=_RESTORES_S,
            registry=registry,
        )
        self.snapshot_lag_tokens = Histogram(
            "midstream_snapshot_lag_tokens",
            "Journaled tokens that a restored session had to regenerate.",
            buckets=_LAGS_TOKENS,
            registry=registry,
        )
        self.output_mismatches = Counter(
            "midstream_output_mismatch",
            "Replays that did not begin with what was journaled; nothing of them was sent.",
            registry=registry,
        )
        self.restores_refused = Counter(
            "midstream_restore_refused",
            "Sessions that could not be taken up, and KV that could not be used, by reason.",
            ("reason",),
            registry=registry,
        )
        self.sessions = Gauge("midstream_sessions", "Sessions by state.", ("state",), registry=registry)
        self.workers = Gauge("midstream_workers", "Workers by state.", ("state",), registry=registry)
        self.worker_restarts = Counter(
            "midstream_worker_restarts", "Restarts of engines that midstream started.", ("worker",), registry=registry
        )
        self.parkings = Counter(
            "midstream_parkings",
            "Workers that were to be parked, or brought back, and where they came to rest.",
            ("order", "state"),
            registry=registry,
        )
        self.orphans_killed = Counter(
            "midstream_orphans_killed",
            "Processes of engines that others started, ended because their front end was gone.",
            ("worker",),
            registry=registry,
        )
        self.arena_full = Counter(
            "midstream_arena_full",
            "Sessions that ran without a journal because the arena was full.",
            registry=registry,
        )
        self.arena_missing = Counter(
            "midstream_arena_missing",
            "Starts of engines without an arena, for which there was no room.",
            registry=registry,
        )
        self.plugin_events = Counter(
            "midstream_plugin_events",
            "What the plugin in an engine counted: arena_full, hook_errors, reservations_lost, loads_timed_out.",
            ("worker", "event"),
            registry=registry,
        )
        self._plugins: dict[str, tuple[int, Mapping[str, int]]] = {}
        self.holder_restarts = Counter("midstream_holder_restarts", "New holders after one died.", registry=registry)
        self.tokens_sent = Counter("midstream_tokens_sent", "Output tokens streamed to clients.", registry=registry)
        self.requests = Counter(
            "midstream_requests",
            "Requests by route, kind (session or plain) and answer code.",
            ("path", "kind", "code"),
            registry=registry,
        )

    def failover(
        self, *, reason: str, outcome: str, tier: str, gap_s: float | None = None, lag_tokens: int | None = None
    ) -> None:
        """Count one interruption and what it came to; gap and lag only where the session went on."""
        self.failovers.labels(reason, outcome, tier).inc()
        if gap_s is not None:
            self.client_gap_s.observe(gap_s)
        if lag_tokens is not None:
            self.snapshot_lag_tokens.observe(lag_tokens)

    def set_sessions(self, counts: Mapping[str, int]) -> None:
        """How many sessions are in each state; a state that is not named has none."""
        _set_states(self.sessions, counts)

    def set_workers(self, counts: Mapping[str, int]) -> None:
        """How many workers are in each state; a state that is not named has none."""
        _set_states(self.workers, counts)

    def set_plugin(self, worker: str, epoch: int, counters: Mapping[str, int]) -> None:
        """The counters of a worker's plugin as its arena has them now; those of a new epoch begin at 0."""
        known_epoch, known = self._plugins.get(worker, (epoch, {}))
        before = known if known_epoch == epoch else {}
        for event, count in counters.items():
            more = max(count - before.get(event, 0), 0)
            self.plugin_events.labels(worker, event).inc(more)
            if event == "arena_full":
                self.arena_full.inc(more)
        self._plugins[worker] = epoch, dict(counters)

    def set_mover(self, status: Mapping[str, Any] | None) -> None:
        """The mover's own figures as it reported them last; None when it does not answer."""
        self._mover.status = status

    def set_replicas(self, status: Mapping[str, Any] | None) -> None:
        """The replica process's own figures as it reported them last; None when it does not answer."""
        self._replicas.is_asked = True
        self._replicas.status = status

    def request(self, path: str, kind: str, code: int) -> None:
        """Count one answered request; `path` is a route, never what the client wrote."""
        self.requests.labels(path, kind, str(code)).inc()

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class _Status(Collector):
    """Copies each number of a process's status to a gauge `midstream_<process>_<name>`."""

    def __init__(self, process: str) -> None:
        self._process = process
        self.status: Mapping[str, Any] | None = None
        # Every sidecar has a mover, and few have more.
        self.is_asked = process == "mover"

    def collect(self) -> Iterable[Metric]:
        if not self.is_asked:
            return
        process, up = self._process, 0 if self.status is None else 1
        yield GaugeMetricFamily(f"midstream_{process}_up", f"Whether the {process} process answers.", value=up)
        for name, value in sorted(_numbers(self.status or {}).items())[:_STATUS_FIELDS_MAX]:
            yield GaugeMetricFamily(f"midstream_{process}_{name}", f"`{name}` of its status.", value=value)

    def describe(self) -> Iterable[Metric]:
        return []


def _numbers(status: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for key, value in status.items():
        name = prefix + "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in str(key))
        if isinstance(value, bool | int | float):
            found[name] = float(value)
        elif isinstance(value, Mapping) and not prefix:
            found |= _numbers(value, f"{name}_")
    return found


def _set_states(gauge: Gauge, counts: Mapping[str, int]) -> None:
    gauge.clear()
    for state, count in counts.items():
        gauge.labels(state).set(count)
