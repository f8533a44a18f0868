"""What midstream needs to know of an engine, and nothing more. Every engine passes the suite in tests/contracts/.

An adapter is pure: it says how to start an engine beside a sidecar, how a request carries a marker, and which HTTP
calls ask for health and quiet. Processes and sockets belong to the sidecar and the proxy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..session.errors import EngineError
from ..session.key import CompatibilityKey
from ..session.marker import Marker, with_marker


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What can be done with an engine's sessions.

    `hides_ids_as_null`: where nobody asked for token ids, the engine writes `null` instead of leaving the key out.
    """

    standby: bool
    in_place: bool
    disk: bool
    quiesce: bool
    hides_ids_as_null: bool


@dataclass(frozen=True, slots=True)
class Beside:
    """The sidecar as an engine sees it: names and paths of one worker epoch."""

    worker: str
    epoch: int
    holder: Path
    arena: Path | None
    adopt: Path | None
    load_timeout_s: float
    plugin_dir: Path

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The whole environment of an engine that runs beside this sidecar."""
        own = {
            "MIDSTREAM_WORKER": self.worker,
            "MIDSTREAM_EPOCH": str(self.epoch),
            "MIDSTREAM_HOLDER": str(self.holder),
            "MIDSTREAM_LOAD_TIMEOUT_S": f"{self.load_timeout_s:g}",
            "PYTHONPATH": ":".join(filter(None, (str(self.plugin_dir), inherited.get("PYTHONPATH")))),
        }
        if self.arena is not None:
            own["MIDSTREAM_ARENA"] = str(self.arena)
        if self.adopt is not None:
            own["MIDSTREAM_ADOPT"] = str(self.adopt)
        # What an outer engine was told is not meant for this one.
        return {**{k: v for k, v in inherited.items() if k not in ("MIDSTREAM_ARENA", "MIDSTREAM_ADOPT")}, **own}


@dataclass(frozen=True, slots=True)
class Launch:
    """A command with its environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A call to the engine, relative to its base URL."""

    method: str
    path: str


class EngineAdapter(ABC):
    """One kind of engine."""

    name: str
    capabilities: Capabilities
    # Paths that the engine serves for its operator; the proxy must not pass them through. One that ends in / stands
    # for all below it.
    private_paths: frozenset[str] = frozenset()

    @abstractmethod
    def recognises(self, argv: Sequence[str]) -> bool:
        """Whether this command starts such an engine."""

    @abstractmethod
    def start(self, argv: Sequence[str], port: int, beside: Beside, env: Mapping[str, str]) -> Launch:
        """The command that starts the engine on 127.0.0.1:`port` beside a sidecar. EngineError says what is wrong."""

    @abstractmethod
    def attach(self, worker: str, state_dir: Path) -> Launch:
        """What an engine that others start must be given: flags to add (`argv`) and variables to set (`env`)."""

    def key(self, facts: Mapping[str, Any]) -> CompatibilityKey:
        """The engine's key, from what its plugin published in the arena. EngineError when it is incomplete."""
        try:
            return CompatibilityKey.from_json(facts.get("key"))
        except ValueError as error:
            raise EngineError(f"{self.name}: {error}; run the same midstream in the engine and beside it") from error

    def submit(self, body: dict[str, Any], marker: Marker) -> dict[str, Any]:
        """The request body of a new session."""
        return with_marker(body, marker)

    def resume(self, body: dict[str, Any], marker: Marker) -> dict[str, Any]:
        """The request body with which a session goes on where `marker.resume` says. EngineError without one."""
        if marker.resume is None:
            raise EngineError(f"session {marker.session}: nothing says where it goes on")
        return with_marker(body, marker)

    def health(self) -> HttpCall:
        """Answers 200 when the engine serves."""
        return HttpCall("GET", "/health")

    def quiesce(self) -> HttpCall | None:
        """Stops decoding at a step boundary without ending a session; None where the engine cannot."""
        return None

    def unquiesce(self) -> HttpCall | None:
        """Undoes `quiesce`."""
        return None


def set_flag(argv: Sequence[str], flag: str, value: str) -> list[str]:
    """The command with `flag` set to `value`, wherever and however it was given before (`--x y` or `--x=y`)."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word == flag:
            skip = True
        elif not word.startswith(f"{flag}="):
            kept.append(word)
    return [*kept, flag, value]


def flag_value(argv: Sequence[str], flag: str) -> str | None:
    """The value that a command gives a flag, or None."""
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None
