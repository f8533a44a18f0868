"""The tree of everything that midstream raises on purpose.

MidstreamError
├── ConfigError        a setting is wrong; the text names its place
├── ArenaError         an arena cannot be created, mapped or read
├── LifelineError      a lifeline cannot be created, held or watched
├── PoolError          a pool cannot be placed, found or mapped
├── StoreError         a stored snapshot is missing, torn or not readable
│   └── CorruptError   bytes differ from what their checksum promises
├── KeyMismatch        KV of one engine offered to another
├── CoordinationError  the fleet's coordination service did not do what it was asked, or did not say so
│   └── LeaseLost      a member's lease is over for good; it has to join again
├── ParkError          a process cannot be parked, or brought back
├── EngineError        an engine cannot be started or does not answer as its contract says
└── Refused            no worker can take a session, or its policy forbids what could be done

Texts say the fact, then the remedy.
"""


class MidstreamError(Exception):
    """Base of all errors that are raised on purpose."""


class ConfigError(MidstreamError):
    """A setting is wrong."""


class ArenaError(MidstreamError):
    """An arena cannot be created, mapped or read."""


class LifelineError(MidstreamError):
    """A lifeline cannot be created, held or watched."""


class PoolError(MidstreamError):
    """A pool cannot be placed, found or mapped."""


class StoreError(MidstreamError):
    """A stored snapshot is missing, torn or not readable."""


class CorruptError(StoreError):
    """Bytes differ from what their checksum promises."""


class KeyMismatch(MidstreamError):
    """KV of one engine was offered to another that must not use it."""


class CoordinationError(MidstreamError):
    """The fleet's coordination service did not do what it was asked, or did not say that it did."""


class LeaseLost(CoordinationError):
    """A member's lease is over for good."""


class ParkError(MidstreamError):
    """A process cannot be parked, or brought back."""


class EngineError(MidstreamError):
    """An engine cannot be started, or does not answer as its contract says."""


class Refused(MidstreamError):
    """A session cannot be taken up; `reason` is a stable word for metrics."""

    def __init__(self, reason: str, text: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(text)
        self.reason = reason
        self.retry_after_s = retry_after_s
