"""What a node of the fleet shows to another, and what it asks of it: files on disk, made into contexts and a secret.

Owns reading them. Invariant: credentials that exist suffice: a secret, or certificates by which both sides know each
other; and a secret's file is nobody else's to read. Holds no sockets.
"""

import os
import ssl
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ...session.errors import ConfigError
from .signatures import SECRET_BYTES_MIN

_SECRET_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """Where they are. `ca` is whose signature on the other side's certificate is believed."""

    secret: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A secret, or contexts for both ends, or both. With certificates, each side shows one and checks the other's."""

    secret: bytes | None = field(default=None, repr=False)
    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None
    is_mutual: bool = False


def read_credentials(files: CredentialFiles) -> Credentials | None:
    """What the files hold; None where nothing is configured. ConfigError names the file and what is wrong with it."""
    if files == CredentialFiles():
        return None
    secret = _secret(files.secret) if files.secret is not None else None
    if (files.certificate is None) != (files.key is None):
        raise ConfigError("a certificate needs its key, and a key its certificate; give both files")
    is_mutual = files.certificate is not None and files.ca is not None
    if secret is None and not is_mutual:
        raise ConfigError("a certificate alone says who this is, and not who may ask; add the CA's, or a secret")
    server = client = None
    try:
        if files.certificate is not None:
            server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=files.ca)
            server.minimum_version = ssl.TLSVersion.TLSv1_3
            server.load_cert_chain(files.certificate, files.key)
            if is_mutual:
                server.verify_mode = ssl.CERT_REQUIRED
        if files.ca is not None:
            client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=files.ca)
            client.minimum_version = ssl.TLSVersion.TLSv1_3
            if files.certificate is not None:
                client.load_cert_chain(files.certificate, files.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificates of the fleet cannot be used: {error}; look at the files and their rights"
        ) from error
    return Credentials(secret, server, client, is_mutual)


def _secret(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            content = file.read(_SECRET_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; give a file with the fleet's secret") from error
    if stat.S_IMODE(mode) & 0o007:
        raise ConfigError(f"{path}: everybody may read or write it; chmod 600 {path}")
    secret = content.strip()
    if not SECRET_BYTES_MIN <= len(secret) <= _SECRET_BYTES_MAX:
        raise ConfigError(
            f"{path}: {len(secret)} bytes are no secret; put {SECRET_BYTES_MIN} random ones or more there"
        )
    return secret
