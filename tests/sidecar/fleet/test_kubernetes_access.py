"""How the Kubernetes API is found: pods and kubeconfigs, and what is said of those that do not do."""

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
import yaml
from contracts.coordination_suite import LEASE_S, NODE, eventually

from midstream.session.errors import ConfigError, CoordinationError
from midstream.sidecar.config import Fleet
from midstream.sidecar.fleet.fence import WhenAlone
from midstream.sidecar.fleet.kubernetes import KubernetesService
from midstream.sidecar.fleet.kubernetes_access import KubernetesAccess, from_kubeconfig, in_pod
from midstream.sidecar.fleet.leased import LeasedCoordination
from midstream.sidecar.fleet.local import LocalCoordination
from midstream.sidecar.fleet.opening import open_coordination
from support.certificates import Certificates, make_certificates
from support.lease_api_server import LeaseApiServer

POD = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def kubeconfig(folder: Path, user: dict[str, Any], **cluster: Any) -> Path:
    tree = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "models"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    file = folder / "config"
    file.write_text(yaml.safe_dump(tree))
    return file


async def joins(access: KubernetesAccess) -> None:
    fleet = LeasedCoordination(KubernetesService(access, "fleet"), WhenAlone.STOP)
    try:
        joined = await fleet.join(NODE, LEASE_S)
        await joined.leave()
    finally:
        await fleet.close()


def account(folder: Path, certificates: Certificates) -> Path:
    (folder / "token").write_text("good\n")
    (folder / "namespace").write_text("models")
    (folder / "ca.crt").write_bytes(certificates.ca.read_bytes())
    return folder


async def test_a_pod_uses_its_service_account_and_trusts_its_cluster_alone(
    tmp_path: Path, certificates: Certificates
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    async with LeaseApiServer(tls=context).running() as server:
        environ = {**POD, "KUBERNETES_SERVICE_PORT": server.url.rpartition(":")[2]}
        folder = account(tmp_path, certificates)
        access = in_pod(environ=environ, account=folder)
        assert (access.server, access.namespace) == (server.url, "models")
        await joins(access)
        assert in_pod("others", environ, folder).namespace == "others"
        other = tmp_path / "other"
        other.mkdir()
        (folder / "ca.crt").write_bytes(make_certificates(other).ca.read_bytes())
        with pytest.raises(CoordinationError, match="CERTIFICATE_VERIFY_FAILED"):
            await joins(in_pod(environ=environ, account=folder))


async def test_a_client_certificate_of_a_kubeconfig_is_shown(tmp_path: Path, certificates: Certificates) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca))
    context.load_cert_chain(certificates.server_cert, certificates.server_key)
    context.verify_mode = ssl.CERT_REQUIRED
    async with LeaseApiServer(tokens={""}, tls=context).running() as server:
        inline = {
            "client-certificate-data": base64.b64encode(certificates.client_cert.read_bytes()).decode(),
            "client-key-data": base64.b64encode(certificates.client_key.read_bytes()).decode(),
        }
        files = {"client-certificate": str(certificates.client_cert), "client-key": str(certificates.client_key)}
        for user in (inline, files):
            await joins(
                from_kubeconfig(
                    kubeconfig(tmp_path, user, server=server.url, **{"certificate-authority": str(certificates.ca)})
                )
            )
        named = {"certificate-authority": str(certificates.ca), "tls-server-name": "another.example"}
        with pytest.raises(CoordinationError, match="CERTIFICATE_VERIFY_FAILED"):
            await joins(from_kubeconfig(kubeconfig(tmp_path, inline, server=server.url, **named)))


async def test_a_command_of_a_kubeconfig_is_run_again_when_its_token_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "login"
    script.write_text(
        "#!/bin/sh\n"
        'case "$KUBERNETES_EXEC_INFO" in *client.authentication.k8s.io/v1*) ;; *) exit 7 ;; esac\n'
        'echo "$1 $WHO" >> "$(dirname "$0")/asked"\n'
        'printf \'{"kind":"ExecCredential","status":{"token":"%s"}}\' "$(cat "$(dirname "$0")/current")"\n'
    )
    script.chmod(0o755)
    (tmp_path / "current").write_text("good")
    command = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": "./login",
        "args": ["a"],
        "env": [{"name": "WHO", "value": "me"}],
    }
    async with LeaseApiServer().running() as server:
        access = from_kubeconfig(kubeconfig(tmp_path, {"exec": command}, server=server.url))
        fleet = LeasedCoordination(KubernetesService(access, "fleet"), WhenAlone.STOP)
        joined = await fleet.join(NODE, LEASE_S)
        asked = (tmp_path / "asked").read_text().splitlines()
        assert asked == ["a me"]
        access.reject()
        assert await asyncio.gather(*(access.token() for _ in range(5))) == ["good"] * 5
        assert len((tmp_path / "asked").read_text().splitlines()) == 2, "run once for all who wait"
        (tmp_path / "current").write_text("better")
        server.tokens = {"better"}
        await asyncio.sleep(LEASE_S)
        await eventually(joined.may_send)
        assert len((tmp_path / "asked").read_text().splitlines()) == 3
        await fleet.close()


@pytest.mark.parametrize(
    ("script", "error", "told"),
    [
        ("echo no >&2; exit 3", CoordinationError, "ended with 3: no"),
        ("echo '{}'", ConfigError, "printed no ExecCredential"),
        ('echo \'{"status":{"token":""}}\'', ConfigError, "a token that is none"),
        (None, ConfigError, "cannot be started"),
    ],
)
async def test_a_command_that_does_not_do_is_named(
    tmp_path: Path, script: str | None, error: type[Exception], told: str
) -> None:
    if script is not None:
        (tmp_path / "login").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "login").chmod(0o755)
    command = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login"}
    access = from_kubeconfig(kubeconfig(tmp_path, {"exec": command}))
    with pytest.raises(error, match=told):
        await access.token()


@pytest.mark.parametrize(
    ("user", "cluster", "told"),
    [
        ({"auth-provider": {"name": "oidc"}}, {}, "user u: auth-provider is not understood; use .*exec"),
        ({"username": "a", "password": "b"}, {}, "password, username is not understood"),
        ({"exec": {"command": "x"}}, {}, "exec: expected apiVersion"),
        ({"client-certificate": "missing"}, {}, "client-certificate cannot be read"),
        ({"client-certificate-data": "Zm9v"}, {}, "needs both"),
        ({"client-certificate-data": "Zm9v", "client-key-data": "Zm9v"}, {}, "client's certificate cannot be used"),
        ({"client-key-data": "!"}, {}, "client-key-data is not base64"),
        ({}, {"server": "10.0.0.1"}, "no http or https URL"),
        ({}, {"proxy-url": "http://p"}, "proxy-url is not understood"),
        ({}, {"certificate-authority-data": "Zm9v"}, "certificate of the authority cannot be used"),
    ],
)
def test_a_kubeconfig_that_does_not_do_is_refused_by_name(
    tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        from_kubeconfig(kubeconfig(tmp_path, user, **cluster))


def test_what_is_no_kubeconfig_is_said_to_be_none(tmp_path: Path) -> None:
    for text, told in (
        ("[", "not valid YAML"),
        ("a", "no kubeconfig"),
        ("", "is empty"),
        ("{}", "no context is called"),
    ):
        (tmp_path / "config").write_text(text)
        with pytest.raises(ConfigError, match=told):
            from_kubeconfig(tmp_path / "config")
    with pytest.raises(ConfigError, match="no context is called 'other'"):
        from_kubeconfig(kubeconfig(tmp_path, {}), context="other")
    with pytest.raises(ConfigError, match="No such file"):
        from_kubeconfig(tmp_path / "missing")


def test_settings_name_the_service_and_what_is_missing(tmp_path: Path) -> None:
    assert isinstance(open_coordination(Fleet()), LocalCoordination)
    for fleet, told in (
        (Fleet(coordination="etcd"), r"set fleet\.etcd_endpoints"),
        (Fleet(coordination="etcd", etcd_endpoints="http://a", etcd_user="u"), r"set fleet\.etcd_password_file"),
        (Fleet(coordination="etcd", etcd_endpoints="http://a", etcd_key="k"), r"set fleet\.etcd_cert"),
        (Fleet(coordination="etcd", etcd_endpoints="https://a", etcd_ca="/missing"), r"check fleet\.etcd_ca"),
        (Fleet(coordination="kubernetes", kubeconfig=str(tmp_path / "missing")), "cannot be read"),
        (Fleet(group="My_Fleet"), r"fleet\.group: name 'My_Fleet'"),
    ):
        with pytest.raises(ConfigError, match=told):
            open_coordination(fleet)


async def test_settings_open_the_service_that_they_name(tmp_path: Path) -> None:
    async with LeaseApiServer().running() as server:
        file = kubeconfig(tmp_path, {"token": "good"}, server=server.url)
        fleet = open_coordination(
            Fleet(coordination="kubernetes", kubeconfig=str(file), kubernetes_namespace="x", group="g")
        )
        joined = await fleet.join(NODE, LEASE_S)
        assert set(server.objects) == {f"g.member.{joined.id}"}
        await fleet.close()


def test_outside_of_a_pod_it_is_said_what_to_name() -> None:
    with pytest.raises(ConfigError, match=r"no pod of Kubernetes; name a kubeconfig with fleet\.kubeconfig"):
        in_pod(environ={})
