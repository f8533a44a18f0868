"""Certificates for tests: an authority, and what it signs for 127.0.0.1."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """Files of an authority, of a server and of a client."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """New ones, valid for some days."""
    made = Certificates(*(folder / f"{name}.pem" for name in ("ca", "server", "server-key", "client", "client-key")))
    ca_key = folder / "ca-key.pem"
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    authority = ["-addext", "keyUsage=critical,keyCertSign,cRLSign", "-subj", "/CN=test authority"]
    _openssl("req", "-x509", *new_key, "-days", "7", "-keyout", str(ca_key), "-out", str(made.ca), *authority)
    for cert, key, use in (
        (made.server_cert, made.server_key, "serverAuth,clientAuth"),
        (made.client_cert, made.client_key, "clientAuth"),
    ):
        asked, extensions = cert.with_suffix(".csr"), cert.with_suffix(".ext")
        extensions.write_text(
            f"subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage={use}\nbasicConstraints=CA:FALSE\n"
            "keyUsage=critical,digitalSignature\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n"
        )
        _openssl("req", *new_key, "-keyout", str(key), "-out", str(asked), "-subj", f"/CN={use}")
        signer = ["-CA", str(made.ca), "-CAkey", str(ca_key), "-CAcreateserial", "-days", "7"]
        _openssl("x509", "-req", "-in", str(asked), *signer, "-extfile", str(extensions), "-out", str(cert))
    return made


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
