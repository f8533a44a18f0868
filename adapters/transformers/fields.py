"""Typed reading of a request's body: each field has a kind and bounds, and an error that names it. Pure."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from ...session.errors import EngineError


class RequestError(EngineError):
    """A request that cannot be served as it is: HTTP status, the field's name, and text for the client."""

    def __init__(
        self, text: str, *, param: str | None = None, status: int = 400, retry_after_s: int | None = None
    ) -> None:
        super().__init__(text)
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s


class Fields:
    """Typed reading of a body; null counts as absent, as OpenAI clients send it. It notes what was asked for."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._asked: set[str] = set()

    @property
    def unread(self) -> list[str]:
        """The fields that are there and that nobody has asked for, in their order."""
        return [name for name, value in self._body.items() if value is not None and name not in self._asked]

    def get(self, name: str) -> Any:
        """A field as it is; None when absent."""
        self._asked.add(name)
        return self._body.get(name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise RequestError(f"{name} must be true or false, not {value!r:.80}", param=name)
        return value

    def text(self, name: str) -> str | None:
        """A text, or None."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{name} must be a text, not {value!r:.80}", param=name)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; empty when absent."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise RequestError(f"{name} must be an object, not {value!r:.80}", param=name)
        return value

    def number(self, name: str, default: float, least: float, most: float, *, above_least: bool = False) -> float:
        """A finite number within bounds."""
        value = self.get(name)
        if value is None:
            return default
        known = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not known or not least <= value <= most or (above_least and value == least):
            bound = "above" if above_least else "from"
            raise RequestError(f"{name} must be {bound} {least:g} to {most:g}, not {value!r:.80}", param=name)
        return float(value)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number within bounds."""
        value = self.optional_whole(name, least, most)
        return default if value is None else value

    def optional_whole(self, name: str, least: int, most: int = 1 << 31) -> int | None:
        """A whole number within bounds, or None."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RequestError(f"{name} must be a whole number from {least} to {most}, not {value!r:.80}", param=name)
        return value
