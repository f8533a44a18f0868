"""The nodes of a gateway as they are written in its settings: `[NAME=]URL`, with commas between. Pure."""

from urllib.parse import urlsplit

from ...session.errors import ConfigError
from ..fleet.record import member_name

NODES_MAX = 2048


def node_urls(text: str) -> dict[str, str]:
    """Names and base URLs. ConfigError names what is wrong, and where there is none."""
    found: dict[str, str] = {}
    for index, word in enumerate(filter(None, text.split(","))):
        name, separator, url = word.partition("=")
        if not separator or "://" in name:
            name, url = f"node-{index}", word
        try:
            member_name(name)
        except ValueError as error:
            raise ConfigError(f"gateway.nodes: {error}") from error
        if name in found:
            raise ConfigError(f"gateway.nodes: {name} is named twice; give each node a name of its own")
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ConfigError(f"gateway.nodes: {name}: expected a URL like http://host:8800, got {url!r}")
        found[name] = url.rstrip("/")
    if not found:
        raise ConfigError("a gateway needs nodes: give --node [NAME=]URL, or set gateway.nodes")
    if len(found) > NODES_MAX:
        raise ConfigError(f"gateway.nodes: {len(found)} nodes; at most {NODES_MAX} are looked after")
    return found
