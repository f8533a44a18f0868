"""How events are written to standard error: a line of text, or a JSON object, each.

Owns the root logger of the sidecar's processes. What is logged, and with which key=value fields, is for its callers.
"""

import json
import logging
import sys
from datetime import UTC, datetime

from aiohttp.http_exceptions import HttpProcessingError

from .config import Log


class JsonFormatter(logging.Formatter):
    """One JSON object a line; also an exception stays on its line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        body = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body)


def _is_of_this_process(record: logging.LogRecord) -> bool:
    """False for what is no HTTP: its sender got a 400, and must not be able to fill the log with tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


def configure(settings: Log) -> None:
    """Set up the root logger; replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter()
        if settings.format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=settings.level.upper(), force=True)
    # Its access log would repeat each request that our own events tell already.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("aiohttp.server").addFilter(_is_of_this_process)
