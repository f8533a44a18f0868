"""From settings to the fleet's coordination.

Owns the choice of the service. What settings say is checked here, before anything is asked of it.
"""

from pathlib import Path

from ...session.errors import ConfigError
from ..config import Fleet
from .coordination import Coordination
from .etcd import EtcdService
from .etcd_http import EtcdAccess
from .fence import WhenAlone
from .kubernetes import KubernetesService
from .kubernetes_access import KubernetesAccess, from_kubeconfig, in_pod
from .lease_service import LeaseService
from .leased import LeasedCoordination
from .local import LocalCoordination
from .record import member_name


def open_coordination(fleet: Fleet) -> Coordination:
    """What these settings name; nothing is asked of it yet. ConfigError names the setting that is wrong."""
    try:
        member_name(fleet.group)
    except ValueError as error:
        raise ConfigError(f"fleet.group: {error}") from error
    match fleet.coordination:
        case "none":
            return LocalCoordination()
        case "etcd":
            service: LeaseService = EtcdService(_etcd_access(fleet), fleet.group)
        case "kubernetes":
            service = KubernetesService(_kubernetes_access(fleet), fleet.group)
    return LeasedCoordination(service, WhenAlone(fleet.when_alone))


def _etcd_access(fleet: Fleet) -> EtcdAccess:
    endpoints = tuple(url for url in fleet.etcd_endpoints.split(",") if url)
    if not endpoints:
        raise ConfigError("fleet.coordination is etcd and no etcd is named; set fleet.etcd_endpoints")
    if fleet.etcd_user and not fleet.etcd_password_file:
        raise ConfigError("fleet.etcd_user is set and its password is not; set fleet.etcd_password_file")
    if fleet.etcd_key and not fleet.etcd_cert:
        raise ConfigError("fleet.etcd_key is set and its certificate is not; set fleet.etcd_cert")
    return EtcdAccess(
        endpoints,
        user=fleet.etcd_user,
        password_file=fleet.etcd_password_file,
        ca_file=fleet.etcd_ca,
        cert_file=fleet.etcd_cert,
        key_file=fleet.etcd_key,
    )


def _kubernetes_access(fleet: Fleet) -> KubernetesAccess:
    if fleet.kubeconfig:
        return from_kubeconfig(Path(fleet.kubeconfig), fleet.kubernetes_context, fleet.kubernetes_namespace)
    return in_pod(fleet.kubernetes_namespace)
