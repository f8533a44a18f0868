"""From settings to sources of notices. What settings say is checked here, before anything is asked."""

from pathlib import Path

from ...session.errors import ConfigError
from ..config import Drain, Fleet
from ..fleet.kubernetes_access import KubernetesAccess, from_kubeconfig, in_pod
from .aws import Aws
from .azure import Azure
from .contract import Source
from .gcp import Gcp
from .kubernetes_node import KubernetesNode


def open_sources(drain: Drain, fleet: Fleet) -> list[Source]:
    """Those that the settings name; nothing is asked of them yet. ConfigError names the setting that is wrong."""
    found: list[Source] = []
    for word in filter(None, drain.notices.split(",")):
        match word:
            case "kubernetes":
                found.append(_kubernetes(drain, fleet))
            case "aws":
                found.append(Aws())
            case "gcp":
                found.append(Gcp())
            case "azure":
                found.append(Azure())
            case _:
                raise ConfigError(f"drain.notices: {word!r} is none of kubernetes, aws, gcp and azure")
    return found


def _kubernetes(drain: Drain, fleet: Fleet) -> KubernetesNode:
    if not drain.kubernetes_node:
        raise ConfigError(
            "drain.notices names kubernetes, and no node; set drain.kubernetes_node, as by spec.nodeName of the pod"
        )
    access: KubernetesAccess
    if fleet.kubeconfig:
        access = from_kubeconfig(Path(fleet.kubeconfig), fleet.kubernetes_context, fleet.kubernetes_namespace)
    else:
        access = in_pod(fleet.kubernetes_namespace)
    return KubernetesNode(access, drain.kubernetes_node, _words(drain.taints), _words(drain.conditions))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]
