"""The chart's manifests: what Kubernetes takes, who runs as whom, and in which order."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.charts import Charts, Rendered, RenderError, newest_version, validate

# The oldest that the chart is for, and whatever is newest where the tests run.
OLDEST = "1.29.0"
CPU = {"gpu": {"enabled": False}, "engine": {"image": {"repository": "example/engine-for-cpus"}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "sglang": {"engine": {"kind": "sglang"}},
    "vllm on CPUs": CPU,
    "sglang on CPUs": {**CPU, "engine": {**CPU["engine"], "kind": "sglang"}},
    "two engines": {"engine": {"count": 2}, "replicas": 3},
    "a store for each pod": {"store": {"enabled": True, "storageClassName": "fast"}},
    "a store that ends with the pod": {"store": {"enabled": True, "persistent": False}},
    "tier 1": {"config": {"tier1": {"bytes": 64 << 30, "tail": "64"}}},
    "a service monitor": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "a network policy": {
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {"matchLabels": {"team": "a"}}}],
            "egress": [{"ports": [{"port": 443, "protocol": "TCP"}]}],
        }
    },
    "coordination": {"fleet": {"coordination": "kubernetes"}},
    "a watched node": {"config": {"drain": {"notices": "aws,kubernetes"}}},
    "gateways that ask the API": {
        "gateway": {"enabled": True},
        "fleet": {"secretName": "fleet", "coordination": "kubernetes"},
    },
    "gateways": {
        "replicas": 3,
        "gateway": {"enabled": True},
        "fleet": {"secretName": "fleet"},
        "networkPolicy": {"enabled": True, "from": [{"podSelector": {}}]},
        "serviceMonitor": {"enabled": True},
    },
    "snapshots of other pods": {
        "replicas": 2,
        "gateway": {
            "enabled": True,
            "volumes": [{"name": "etcd-tls", "secret": {"secretName": "etcd-tls"}}],
            "volumeMounts": [{"name": "etcd-tls", "mountPath": "/etc/etcd-tls", "readOnly": True}],
        },
        "fleet": {"secretName": "fleet", "coordination": "kubernetes"},
        "store": {"enabled": True, "persistent": False},
        "config": {
            "replicas": {
                "memory_bytes": 1 << 30,
                "listen": "0.0.0.0:8801",
                "tls_cert": "/etc/peers/tls.crt",
                "tls_key": "/etc/peers/tls.key",
                "tls_ca": "/etc/peers/ca.crt",
            }
        },
        "volumes": [{"name": "peers", "secret": {"secretName": "peers", "defaultMode": 0o440}}],
        "sidecar": {"volumeMounts": [{"name": "peers", "mountPath": "/etc/peers", "readOnly": True}]},
        "networkPolicy": {
            "enabled": True,
            "from": [{"podSelector": {}}],
            "egress": [{"ports": [{"port": 53, "protocol": "UDP"}]}],
        },
    },
    "rescued pools": {"gpu": {"rescuePools": True}},
    "no runtime class": {"gpu": {"runtimeClassName": ""}},
    "the platform's user": {"podSecurity": {"user": None, "group": None}},
    "no budget": {"podDisruptionBudget": {"enabled": False}},
    "no account": {"serviceAccount": {"create": False}},
    "whatever a pod can have": {
        "imagePullSecrets": [{"name": "secret"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "nodeSelector": {"gpu": "h200"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
        "priorityClassName": "high",
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"e": "f"}},
        "engine": {
            "model": "/models/large",
            "args": ["--max-model-len", 4096, "--dtype=bfloat16"],
            "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
            "envFrom": [{"secretRef": {"name": "hub"}}],
            "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"memory": "64Gi"}},
            "cache": {"existingClaim": "cache"},
            "pythonPath": "/somewhere",
            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
            "liveness": False,
        },
        "sidecar": {
            "resources": {"requests": {"cpu": "2"}},
            "env": [{"name": "MIDSTREAM_LOG_LEVEL", "value": "debug"}],
        },
    },
}
# Its fields are younger than the oldest cluster.
CLAIM = {"gpu": {"access": "claim", "claimTemplate": "one-gpu", "runtimeClassName": ""}}
EVERY = {**OPTIONS, "a claim": CLAIM}
LONG = "a" * 53  # Helm allows no longer name of a release


@pytest.fixture(scope="module", params=EVERY)
def rendered(request: pytest.FixtureRequest, chart: Charts) -> Rendered:
    return chart.render(EVERY[request.param])


@pytest.mark.parametrize("option", OPTIONS)
def test_the_oldest_cluster_takes_every_field(chart: Charts, option: str) -> None:
    validate(chart.render(OPTIONS[option]), OLDEST)


def test_the_newest_cluster_takes_every_field(rendered: Rendered) -> None:
    validate(rendered, newest_version())


def test_a_field_that_no_cluster_knows_would_be_found(chart: Charts) -> None:
    from jsonschema import ValidationError

    for version in (OLDEST, newest_version()):
        rendered = chart.render()
        rendered.pod["containers"][0]["livenessprobe"] = {}
        with pytest.raises(ValidationError, match="livenessprobe"):
            validate(rendered, version)


@pytest.mark.parametrize("option", ["defaults", "vllm on CPUs", "a store for each pod", "coordination"])
def test_helm_itself_finds_nothing_to_complain_of(chart: Charts, option: str) -> None:
    # 1 is information: the chart has no icon.
    assert [message for message in chart.lint(OPTIONS[option]) if message["severity"] > 1] == []


def test_the_native_sidecars_come_first_and_are_started_again(rendered: Rendered) -> None:
    init = rendered.pod["initContainers"]
    assert [(c["name"], c.get("restartPolicy")) for c in init] == [
        ("holder", "Always"),
        ("midstream", "Always"),
        ("plugin", None),
    ]
    # The next one waits for these; without them engines would start beside nobody.
    assert all("startupProbe" in container for container in init[:2])


def test_nothing_runs_as_root_or_may_become_more_than_it_is(rendered: Rendered) -> None:
    for pod in rendered.pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"].get("runAsUser", 1) > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    for container in containers_of(rendered):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"]["drop"] == ["ALL"]
        assert not {"runAsUser", "runAsGroup", "runAsNonRoot", "privileged", "seccompProfile"} & set(context)


def containers_of(rendered: Rendered) -> list[dict[str, Any]]:
    """Those of all pods."""
    return [c for pod in rendered.pods for c in (*pod.get("initContainers", []), *pod["containers"])]


def test_only_where_it_is_asked_for_anybody_has_a_capability(chart: Charts) -> None:
    def added(rendered: Rendered) -> dict[str, list[str]]:
        held = {c["name"]: c["securityContext"]["capabilities"].get("add") for c in rendered.containers}
        return {name: capabilities for name, capabilities in held.items() if capabilities}

    assert added(chart.render()) == {}
    assert added(chart.render({"gpu": {"rescuePools": True}})) == {"midstream": ["SYS_PTRACE"]}
    assert added(chart.render({**CPU, "gpu": {"enabled": False, "rescuePools": True}})) == {}


def test_all_containers_are_one_user_that_sees_the_processes_of_all(rendered: Rendered) -> None:
    # The holder answers its own user only, and a pool is adopted only when its engine's processes are seen to be gone.
    assert rendered.pod["shareProcessNamespace"] is True
    for container in (rendered.container("holder"), rendered.container("midstream"), *rendered.engines):
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "run"]
        assert (mount["mountPath"], mount.get("readOnly")) == ("/run/midstream", None)


def test_every_volume_is_mounted_and_every_mount_has_a_volume(chart: Charts) -> None:
    for values in EVERY.values():
        rendered = chart.render(values)
        claimed = [c["metadata"]["name"] for c in rendered.workload["spec"].get("volumeClaimTemplates", [])]
        for pod in rendered.pods:
            held = claimed if pod == rendered.pod else []
            volumes = [*(volume["name"] for volume in pod["volumes"]), *held]
            assert len(volumes) == len(set(volumes))
            containers = [*pod.get("initContainers", []), *pod["containers"]]
            assert set(volumes) == {mount["name"] for c in containers for mount in c["volumeMounts"]}
        for container in containers_of(rendered):
            places = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert len(places) == len(set(places))


@pytest.mark.parametrize("name", ["d", "midstream", LONG, LONG[:-1] + "b"])
@pytest.mark.parametrize("option", ["two engines", "a store for each pod", "gateways"])
def test_names_are_unique_and_short_enough_for_what_is_added_to_them(chart: Charts, option: str, name: str) -> None:
    rendered = chart.render(OPTIONS[option], name=name)
    named = [(document["kind"], document["metadata"]["name"]) for document in rendered.documents]
    assert len(named) == len(set(named))
    # The controller's digest and the pod's own suffix go into labels and host names.
    for workload in filter(None, (rendered.workload, rendered.gateway)):
        assert len(workload["metadata"]["name"] + "-0123456789-01234") <= 63
    containers = [container["name"] for container in rendered.containers]
    assert len(containers) == len(set(containers))
    for label in (*(name for _, name in named), *containers, *(v["name"] for v in rendered.pod["volumes"])):
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", label), label
    for document in (*rendered.documents, rendered.workload["spec"]["template"]):
        assert all(len(value) <= 63 for value in document["metadata"]["labels"].values())


@settings(max_examples=25)
@given(name=st.from_regex(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", fullmatch=True))
def test_whatever_a_release_is_called_a_service_can_have_its_name(chart: Charts, name: str) -> None:
    rendered = chart.render(name=name[:53].rstrip(".-"))
    found = rendered.one("Service")["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,36}[a-z0-9])?", found)
    assert rendered.workload["metadata"]["name"] == found


@pytest.mark.parametrize(
    "pair", [(LONG, LONG[:-1] + "b"), ("a.b", "a-b"), ("1a", "m-1a"), ("a" * 29 + "b" * 24, "a" * 29 + "c" * 24)]
)
def test_two_names_never_become_one(chart: Charts, pair: tuple[str, str]) -> None:
    first, second = (chart.render(name=name).workload["metadata"]["name"] for name in pair)
    assert first != second


def test_every_selector_finds_the_pods_and_no_more_than_theirs(chart: Charts) -> None:
    rendered = chart.render(EVERY["coordination"])
    labels = rendered.workload["spec"]["template"]["metadata"]["labels"]
    others = chart.render(EVERY["coordination"], name="other").workload["spec"]["template"]["metadata"]["labels"]
    selectors = [
        rendered.workload["spec"]["selector"]["matchLabels"],
        rendered.one("Service")["spec"]["selector"],
        rendered.one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        assert not selector.items() <= others.items()


def test_the_monitor_finds_one_service_though_there_are_two(chart: Charts) -> None:
    rendered = chart.render({**OPTIONS["a store for each pod"], "serviceMonitor": {"enabled": True}})
    assert scraped(rendered) == ["demo-midstream"]


def test_with_gateways_it_finds_them_and_the_pods_behind_them(chart: Charts) -> None:
    rendered = chart.render(OPTIONS["gateways"])
    assert scraped(rendered) == ["demo-midstream", "demo-midstream-pods"]
    behind = {
        s["metadata"]["name"]: s["spec"]["selector"]["app.kubernetes.io/component"] for s in rendered.of("Service")
    }
    assert behind == {"demo-midstream": "gateway", "demo-midstream-pods": "node"}


def scraped(rendered: Rendered) -> list[str]:
    """The services that the monitor's selector finds."""
    selector = rendered.one("ServiceMonitor")["spec"]["selector"]
    [among] = selector["matchExpressions"]
    assert among["operator"] == "In"
    return [
        service["metadata"]["name"]
        for service in rendered.of("Service")
        if selector["matchLabels"].items() <= service["metadata"]["labels"].items()
        and service["metadata"]["labels"].get(among["key"]) in among["values"]
    ]


def test_pods_have_names_that_stay_only_where_a_store_or_a_gateway_needs_them(chart: Charts) -> None:
    assert chart.render().workload["kind"] == "Deployment"
    assert chart.render(OPTIONS["a store that ends with the pod"]).workload["kind"] == "Deployment"
    assert chart.render(OPTIONS["gateways"]).workload["kind"] == "StatefulSet"
    kept = chart.render(OPTIONS["a store for each pod"])
    assert kept.workload["kind"] == "StatefulSet"
    headless = [s for s in kept.of("Service") if s["spec"].get("clusterIP") == "None"]
    assert [s["metadata"]["name"] for s in headless] == [kept.workload["spec"]["serviceName"]]


@pytest.mark.parametrize("option", ["a network policy", "gateways"])
def test_a_policy_never_parts_gateways_from_their_pods(chart: Charts, option: str) -> None:
    rendered = chart.render({**OPTIONS["gateways"], **OPTIONS[option]})
    assert rendered.gateway is not None
    policy = rendered.one("NetworkPolicy")["spec"]
    own = policy["podSelector"]
    for workload in (rendered.workload, rendered.gateway):
        assert own["matchLabels"].items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    assert {"podSelector": own} in [peer for rule in policy["ingress"] for peer in rule["from"]]
    assert ("egress" in policy) == (option == "a network policy") == ("Egress" in policy["policyTypes"])
    if "egress" in policy:
        assert {"podSelector": own} in [peer for rule in policy["egress"] for peer in rule.get("to", [])]


def test_pods_reach_each_others_snapshots_and_nobody_else_does(chart: Charts) -> None:
    rendered = chart.render(OPTIONS["snapshots of other pods"])
    # Certificates are made out to names.
    assert rendered.workload["kind"] == "StatefulSet"
    policy = rendered.one("NetworkPolicy")["spec"]
    ports = [(rule["from"], [port["port"] for port in rule["ports"]]) for rule in policy["ingress"]]
    [nodes] = [peers for peers, open_ in ports if open_ == [8801]]
    assert not any(8801 in open_ for peers, open_ in ports if peers != nodes)
    [peer] = nodes
    labels = rendered.workload["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= labels.items()
    assert rendered.gateway is not None
    gateways = rendered.gateway["spec"]["template"]["metadata"]["labels"]
    assert not peer["podSelector"]["matchLabels"].items() <= gateways.items()
    [out] = [rule for rule in policy["egress"] if "to" in rule]
    assert [port["port"] for port in out["ports"]] == [8800, 8801]
    # Without them there is no such port.
    alone = chart.render(OPTIONS["a network policy"])
    assert "8801" not in str(alone.documents)


def test_a_gateway_gets_the_files_that_its_settings_name(chart: Charts) -> None:
    gateway = chart.render(OPTIONS["snapshots of other pods"]).gateway
    assert gateway is not None
    pod = gateway["spec"]["template"]["spec"]
    assert {"name": "etcd-tls", "secret": {"secretName": "etcd-tls"}} in pod["volumes"]
    assert "/etc/etcd-tls" in [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]


def test_the_sidecar_sees_the_gpus_and_takes_none(chart: Charts) -> None:
    def variables(rendered: Rendered, name: str) -> dict[str, Any]:
        return {entry["name"]: entry.get("value") for entry in rendered.container(name).get("env", [])}

    rendered = chart.render({"engine": {"count": 2}, "gpu": {"perEngine": 4}})
    assert [e["resources"]["limits"]["nvidia.com/gpu"] for e in rendered.engines] == [4, 4]
    assert "nvidia.com/gpu" not in rendered.container("midstream")["resources"]["limits"]
    assert variables(rendered, "midstream")["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert rendered.pod["runtimeClassName"] == "nvidia"
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(rendered, "holder")

    claim = chart.render(CLAIM)
    assert claim.pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    for container in (claim.container("midstream"), *claim.engines):
        assert container["resources"]["claims"] == [{"name": "gpu"}]
        assert "nvidia.com/gpu" not in container["resources"].get("limits", {})
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(claim, "midstream")

    none = chart.render(CPU)
    assert "nvidia" not in str(none.documents)
    assert "runtimeClassName" not in none.pod


def test_no_engine_gets_credentials_and_others_only_for_leases(chart: Charts) -> None:
    without = chart.render()
    assert without.of("Role") == without.of("RoleBinding") == []
    assert without.pod["automountServiceAccountToken"] is False
    assert "serviceAccountToken" not in str(without.documents)

    rendered = chart.render(OPTIONS["coordination"])
    assert {r for rule in rendered.one("Role")["rules"] for r in rule["resources"]} == {"leases"}
    [subject] = rendered.one("RoleBinding")["subjects"]
    assert (subject["name"], subject["namespace"]) == (rendered.pod["serviceAccountName"], "some-namespace")
    assert rendered.pod["automountServiceAccountToken"] is False
    assert with_token(rendered) == ["midstream"]
    assert with_token(chart.render(OPTIONS["gateways that ask the API"])) == ["midstream", "gateway"]


def test_a_sidecar_that_watches_its_node_may_read_nodes_and_knows_which_is_its(chart: Charts) -> None:
    rendered = chart.render(OPTIONS["a watched node"])
    [rule] = rendered.one("ClusterRole")["rules"]
    assert (rule["resources"], rule["verbs"]) == (["nodes"], ["get", "list", "watch"])
    [subject] = rendered.one("ClusterRoleBinding")["subjects"]
    assert subject["name"] == rendered.pod["serviceAccountName"]
    assert rendered.one("ClusterRoleBinding")["roleRef"]["name"] == rendered.one("ClusterRole")["metadata"]["name"]
    named = next(
        entry for entry in rendered.container("midstream")["env"] if entry["name"] == "MIDSTREAM_DRAIN_KUBERNETES_NODE"
    )
    assert named["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    assert with_token(rendered) == ["midstream"]
    assert chart.render().of("ClusterRole") == []
    # Gateways have no node of their own.
    assert with_token(chart.render({**OPTIONS["gateways"], **OPTIONS["a watched node"]})) == ["midstream"]


def with_token(rendered: Rendered) -> list[str]:
    """The containers that can prove themselves to the API."""
    return [c["name"] for c in containers_of(rendered) if "token" in {m["name"] for m in c["volumeMounts"]}]


def test_other_settings_make_other_pods(chart: Charts) -> None:
    def digest(values: dict[str, Any]) -> str:
        return str(chart.render(values).workload["spec"]["template"]["metadata"]["annotations"])

    assert digest({}) == digest({})
    assert digest({}) != digest({"config": {"proxy": {"policy": "exact"}}})


def test_the_notes_say_what_was_chosen(chart: Charts) -> None:
    assert "sees all GPUs of its node" in chart.render().notes
    assert "sees all GPUs" not in chart.render(CLAIM).notes
    assert "statefulset/demo-midstream" in chart.render(OPTIONS["a store for each pod"]).notes
    assert "600 s" in chart.render().notes
    assert "600 s" not in chart.render({"engine": {"count": 2}}).notes


def test_without_an_image_or_a_model_nothing_is_rendered(chart: Charts) -> None:
    with pytest.raises(RenderError, match=r"image\.repository is empty; build the image"):
        chart.render(least=False)
    with pytest.raises(RenderError, match=r"engine\.model is empty; name a model"):
        chart.render({"image": {"repository": "x"}}, least=False)
