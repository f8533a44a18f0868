"""From the fleet's settings to what proves requests and what believes them."""

import socket
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ..proxy.fleet import Believer, Prover
from ..session.errors import ConfigError
from .config import Fleet, Settings
from .fleet.proof import CertificateBeliever, CertificateProver, SecretBeliever, SecretProver
from .fleet.record import Readiness, Record, Role, member_name, with_readiness
from .fleet_standing import Standing
from .fleet_streams import FleetStreams
from .replicas.credentials import CredentialFiles, Credentials, read_credentials


def is_in_a_fleet(fleet: Fleet) -> bool:
    """Whether a node says of itself what gateways and others want to know."""
    return fleet.coordination != "none" or fleet.secret_file is not None or bool(fleet.tls_ca)


def credentials_of(fleet: Fleet) -> Credentials | None:
    """What this process shows its fleet, and asks of it; None where none is configured. ConfigError names the file."""
    return read_credentials(
        CredentialFiles(
            secret=Path(fleet.secret_file) if fleet.secret_file is not None else None,
            certificate=Path(fleet.tls_cert) if fleet.tls_cert else None,
            key=Path(fleet.tls_key) if fleet.tls_key else None,
            ca=Path(fleet.tls_ca) if fleet.tls_ca else None,
        )
    )


def believer_of(fleet: Fleet) -> Believer | None:
    """What a node believes; None where no fleet is configured. ConfigError names the file and what is wrong with it."""
    credentials = credentials_of(fleet)
    if credentials is None:
        return None
    if credentials.secret is None:
        return CertificateBeliever()
    # What was recorded before is not to hold once more. Signed times are of whole milliseconds.
    return SecretBeliever(credentials.secret, not_before_s=int(time.time() * 1000) / 1000)


def prover_of(fleet: Fleet) -> Prover:
    """How a gateway proves itself. ConfigError without a secret or a certificate."""
    prover = _prover(credentials_of(fleet))
    if prover is None:
        raise ConfigError(
            "a gateway needs the secret of its fleet: put 32 random bytes or more into a file that only its user can "
            "read, the same on all nodes, and name it with --secret-file or fleet.secret_file; or certificates: "
            "fleet.tls_cert, fleet.tls_key and fleet.tls_ca"
        )
    return prover


def _prover(credentials: Credentials | None) -> Prover | None:
    if credentials is None:
        return None
    if credentials.secret is not None:
        return SecretProver(credentials.secret, credentials.client)
    return CertificateProver(credentials.client) if credentials.client is not None else None


def streams_of(standing: Standing | None, settings: Settings) -> FleetStreams | None:
    """What a process knows of others' streams; None where it has no fleet, or keeps no streams."""
    if standing is None or settings.proxy.reattach_s <= 0:
        return None
    return FleetStreams(
        standing,
        _prover(credentials_of(settings.fleet)),
        believer_of(settings.fleet),
        stops_alone=settings.fleet.when_alone == "stop",
    )


def gateway_record(settings: Settings, listening: str, readiness: Callable[[], Readiness]) -> Callable[[], Record]:
    """What a gateway says of itself from one moment to the next. ConfigError where it could not be reached."""
    told = Record(
        name=node_name(settings.fleet),
        role=Role.GATEWAY,
        url=node_url(settings.fleet, settings.listen.host, listening),
        version=version("midstream"),
    )
    return lambda: with_readiness(told, readiness())


def node_name(fleet: Fleet) -> str:
    """What this node is called: as configured, or as its host. ConfigError when that is no name."""
    name = fleet.name if fleet.name is not None else socket.gethostname().split(".")[0].lower()
    try:
        return member_name(name)
    except ValueError as error:
        raise ConfigError(f"fleet.name: {error}") from error


def node_url(fleet: Fleet, host: str, listening: str) -> str:
    """Where others reach this node, which listens on `host`. ConfigError where nobody could know that."""
    if fleet.url is not None:
        try:
            return Record("node", Role.NODE, fleet.url.rstrip("/")).url
        except ValueError as error:
            raise ConfigError(f"fleet.url: {error}") from error
    if fleet.listen:
        host, listening = fleet.listen.rpartition(":")[0].strip("[]"), f"https://{fleet.listen}"
    if fleet.coordination != "none" and host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"this process listens on {host}, which is no address to be reached at; name one of its own with fleet.url"
        )
    return listening
