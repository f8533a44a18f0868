"""Where the fleet alone reaches a node or gateway: the proxy once more, by TLS, at a port of its own.

Owns that port. Invariants: nothing but TLS 1.3 is spoken there; with an authority named, nobody gets past the handshake
who shows no certificate of it. Clients, probes and what runs on the same machine have the other port, which knows
nothing of this. Certificates are read when the process starts.
"""

import logging

from aiohttp import web

from ..proxy.connections import BoundedSite
from ..session.errors import ConfigError
from .config import Fleet
from .fleet_access import credentials_of
from .listening import listen

_LOG = logging.getLogger("midstream.fleet")


async def listen_to_the_fleet(runner: web.AppRunner, fleet: Fleet, connections_max: int) -> None:
    """Serve the runner's application there as well, if that is wanted. ConfigError names what is missing."""
    if not fleet.listen:
        return
    credentials = credentials_of(fleet)
    if credentials is None or credentials.server is None:
        raise ConfigError(
            f"fleet.listen is {fleet.listen}, which takes TLS alone, and there is no certificate; "
            "set fleet.tls_cert and fleet.tls_key"
        )
    host, _, port = fleet.listen.rpartition(":")
    listener = listen(host.strip("[]"), int(port))
    try:
        await BoundedSite(runner, listener, connections_max=connections_max, tls=credentials.server).start()
    except BaseException:
        listener.close()
        raise
    _LOG.info("event=listening_to_the_fleet at=%s certificates=%s", fleet.listen, credentials.is_mutual)
