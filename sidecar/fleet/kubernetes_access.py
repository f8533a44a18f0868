"""How the Kubernetes API is reached: from a pod by its service account, else by a kubeconfig.

Owns credentials: where they are, and when they are read anew. A token is kept until the API refuses it, and the file
of a service account is read again every minute besides, for the kubelet writes a new one long before the old one ends.
What is understood of a kubeconfig is `server`, the authority's certificate, and as user a token, a client certificate
or a command (`exec`) that prints a token; all else is refused by name.
"""

import asyncio
import base64
import json
import os
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ...session.errors import ConfigError, CoordinationError
from .clock import boot_clock_s

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_READ_EVERY_S = 60.0
_COMMAND_S = 20.0
_FILE_BYTES_MAX = 1 << 20
_USER_FIELDS = {
    *("token", "tokenFile", "client-certificate", "client-certificate-data", "client-key", "client-key-data", "exec"),
}


class KubernetesAccess:
    """One API server and namespace, and the credentials for them."""

    def __init__(
        self,
        server: str,
        namespace: str,
        tls: ssl.SSLContext | bool,
        credential: "Credential | None" = None,
        server_name: str | None = None,
    ) -> None:
        self.server = server.rstrip("/")
        self.namespace = namespace
        self.tls = tls
        self.server_name = server_name
        self._credential = credential

    async def token(self) -> str:
        """The bearer token of this moment; empty where none is needed. ConfigError when it cannot be had."""
        return "" if self._credential is None else await self._credential.token()

    def reject(self) -> None:
        """The API refused the token."""
        if self._credential is not None:
            self._credential.reject()


class Credential:
    """A token that does not change."""

    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        """The token."""
        return self._token

    def reject(self) -> None:
        """Nothing else can be had."""


class FileCredential(Credential):
    """A token in a file that somebody else renews."""

    def __init__(self, file: Path) -> None:
        super().__init__("")
        self._file = file
        self._read_s = -_READ_EVERY_S

    async def token(self) -> str:
        """The token as the file had it within the last minute."""
        if boot_clock_s() >= self._read_s + _READ_EVERY_S:
            self._token = _read(self._file, "the token of the service account").decode(errors="replace").strip()
            self._read_s = boot_clock_s()
        return self._token

    def reject(self) -> None:
        """Read the file again."""
        self._read_s = -_READ_EVERY_S


class CommandCredential(Credential):
    """A token that a command prints (client.authentication.k8s.io)."""

    def __init__(self, command: list[str], environ: Mapping[str, str], version: str) -> None:
        super().__init__("")
        self._command = command
        self._environ = {
            **environ,
            "KUBERNETES_EXEC_INFO": json.dumps(
                {"apiVersion": version, "kind": "ExecCredential", "spec": {"interactive": False}}
            ),
        }
        self._running: asyncio.Task[str] | None = None

    async def token(self) -> str:
        """The token, from the command if there is none; a call that cannot wait for it leaves it running."""
        if not self._token:
            running = self._running
            if running is None:
                running = asyncio.create_task(self._run(), name="fleet-kubernetes-credential")
                self._running = running
            try:
                self._token = await asyncio.shield(running)
            finally:
                if running.done() and self._running is running:
                    self._running = None
        return self._token

    def reject(self) -> None:
        """Run the command again."""
        self._token = ""

    async def _run(self) -> str:
        name = self._command[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise ConfigError(
                f"kubeconfig: exec: {name} cannot be started ({error}); install it, or use a token"
            ) from error
        try:
            async with asyncio.timeout(_COMMAND_S):
                said, told = await process.communicate()
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise CoordinationError(f"kubeconfig: exec: {name} printed nothing within {_COMMAND_S:g} s") from None
            raise
        if process.returncode != 0:
            raise CoordinationError(f"kubeconfig: exec: {name} ended with {process.returncode}: {_last_of(told)}")
        return _token_in(said, name)


def in_pod(namespace: str = "", environ: Mapping[str, str] | None = None, account: Path = _ACCOUNT) -> KubernetesAccess:
    """By the service account of this pod. ConfigError when this is none."""
    environ = os.environ if environ is None else environ
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise ConfigError("this is no pod of Kubernetes; name a kubeconfig with fleet.kubeconfig")
    context = _trusting(_read(account / "ca.crt", "the certificate of the cluster"))
    if not namespace:
        namespace = _read(account / "namespace", "the namespace of the pod").decode(errors="replace").strip()
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    return KubernetesAccess(server, namespace, context, FileCredential(account / "token"))


def from_kubeconfig(
    file: Path, context: str = "", namespace: str = "", environ: Mapping[str, str] | None = None
) -> KubernetesAccess:
    """By a context of a kubeconfig, the current one if none is named. ConfigError names what is missing."""
    environ = os.environ if environ is None else environ
    tree = _yaml(file)
    chosen = context or str(tree.get("current-context") or "")
    place = _named(tree, "contexts", "context", chosen, file)
    cluster = _named(tree, "clusters", "cluster", str(place.get("cluster", "")), file)
    user = _named(tree, "users", "user", str(place.get("user", "")), file) if place.get("user") else {}
    server = str(cluster.get("server", ""))
    if not server.startswith(("http://", "https://")):
        raise ConfigError(f"{file}: cluster {place.get('cluster')}: server {server!r} is no http or https URL")
    if cluster.get("proxy-url"):
        raise ConfigError(f"{file}: proxy-url is not understood here; reach the API server directly")
    if unknown := set(user) - _USER_FIELDS:
        known = ", ".join(sorted(_USER_FIELDS))
        raise ConfigError(
            f"{file}: user {place.get('user')}: {', '.join(sorted(unknown))} is not understood; use {known}"
        )
    return KubernetesAccess(
        server,
        namespace or str(place.get("namespace") or "default"),
        _kubeconfig_tls(cluster, user, file),
        _credential(user, file, environ),
        str(cluster["tls-server-name"]) if cluster.get("tls-server-name") else None,
    )


def _credential(user: Mapping[str, Any], file: Path, environ: Mapping[str, str]) -> Credential | None:
    if user.get("tokenFile"):  # it wins over `token`, which is what it was when the file was written
        return FileCredential(file.parent / str(user["tokenFile"]))
    if user.get("token"):
        return Credential(str(user["token"]))
    if not user.get("exec"):
        return None
    command = user["exec"]
    try:
        argv = [str(command["command"]), *(str(word) for word in command.get("args") or ())]
        added = {str(one["name"]): str(one["value"]) for one in command.get("env") or ()}
        version = str(command["apiVersion"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: exec: expected apiVersion, command, args and env ({error!r})") from error
    if "/" in argv[0]:
        argv[0] = str(file.parent / argv[0])
    return CommandCredential(argv, {**environ, **added}, version)


def _kubeconfig_tls(cluster: Mapping[str, Any], user: Mapping[str, Any], file: Path) -> ssl.SSLContext | bool:
    authority = _part(cluster, "certificate-authority", file)
    certificate, key = _part(user, "client-certificate", file), _part(user, "client-key", file)
    context = _trusting(authority) if authority else ssl.create_default_context()
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate and key:
        # The library takes files only.
        with tempfile.TemporaryDirectory(prefix="midstream-") as folder:
            pair = (Path(folder) / "certificate", Path(folder) / "key")
            for path, data in zip(pair, (certificate, key), strict=True):
                path.touch(mode=0o600)
                path.write_bytes(data)
            try:
                context.load_cert_chain(*pair)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{file}: the client's certificate cannot be used ({error})") from error
    elif certificate or key:
        raise ConfigError(f"{file}: a client certificate needs both client-certificate and client-key")
    return context


def _part(entry: Mapping[str, Any], name: str, file: Path) -> bytes:
    """What lies inline as `<name>-data`, else in the file `<name>`; empty where there is neither."""
    if entry.get(f"{name}-data"):
        try:
            return base64.b64decode(str(entry[f"{name}-data"]), validate=True)
        except ValueError as error:
            raise ConfigError(f"{file}: {name}-data is not base64 ({error})") from error
    return _read(file.parent / str(entry[name]), name) if entry.get(name) else b""


def _trusting(authority: bytes) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cadata=authority.decode())
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"Kubernetes: the certificate of the authority cannot be used ({error})") from error


def _named(tree: Mapping[str, Any], plural: str, single: str, name: str, file: Path) -> Mapping[str, Any]:
    entries = tree.get(plural)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("name") == name and isinstance(entry.get(single), Mapping):
            return entry[single]  # type: ignore[no-any-return]
    raise ConfigError(f"{file}: no {single} is called {name!r}; check {plural}, and fleet.kubernetes_context")


def _yaml(file: Path) -> Mapping[str, Any]:
    try:
        tree = yaml.safe_load(_read(file, "the kubeconfig"))
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{file}: no kubeconfig; name one with fleet.kubeconfig")
    return tree


def _read(file: Path, what: str) -> bytes:
    try:
        with file.open("rb") as opened:
            data = opened.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"Kubernetes: {what} cannot be read at {file} ({error.strerror})") from error
    if not data or len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"Kubernetes: {what} at {file} is empty or larger than 1 MiB")
    return data


def _token_in(said: bytes, name: str) -> str:
    try:
        token = json.loads(said[:_FILE_BYTES_MAX])["status"]["token"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"kubeconfig: exec: {name} printed no ExecCredential with a token ({error!r})") from error
    if not isinstance(token, str) or not token:
        raise ConfigError(f"kubeconfig: exec: {name} printed a token that is none")
    return token


def _last_of(told: bytes) -> str:
    lines = told.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "nothing on standard error"
