"""Values: typos are errors, what does not go together is refused with words, and midstream reads its file."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.session.arena import Geometry
from midstream.sidecar.config import Settings, leaves, require_workers
from midstream.sidecar.config_load import load
from midstream.sidecar.fleet_access import node_url
from midstream.sidecar.gateway.urls import node_urls
from midstream.sidecar.replicas.remotes import peer_at
from support.charts import CHART, DEPLOY, Charts, Rendered, RenderError, merged

CPU = {"gpu": {"enabled": False}, "engine": {"image": {"repository": "example/engine-for-cpus"}}}
MIB = 1 << 20
PEERS = {
    "listen": "0.0.0.0:8801",
    "tls_cert": "/etc/peers/tls.crt",
    "tls_key": "/etc/peers/tls.key",
    "tls_ca": "/etc/peers/ca.crt",
}


def settings_of(rendered: Rendered, folder: Path) -> Settings:
    """What midstream makes of the chart's file."""
    file = folder / "midstream.yaml"
    file.write_text(rendered.settings_file)
    loaded = load(environ={}, file=file).settings
    require_workers(loaded)
    return loaded


def paths(tree: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of the chart's own values."""
    found = []
    for key, value in tree.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found += paths(value, (*above, key))
    return found


VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_file_is_one_that_midstream_reads(chart: Charts, tmp_path: Path) -> None:
    loaded = settings_of(chart.render({"engine": {"count": 2}}), tmp_path)
    assert [(w.name, w.url) for w in loaded.workers] == [
        ("engine-0", "http://127.0.0.1:8101"),
        ("engine-1", "http://127.0.0.1:8102"),
    ]
    assert (loaded.listen.host, loaded.listen.port) == ("0.0.0.0", 8800)
    assert (loaded.store.dir, loaded.log.format) == (None, "json")


def test_the_gateways_file_names_the_pods_as_they_are_called(chart: Charts, tmp_path: Path) -> None:
    values = {
        "replicas": 2,
        "gateway": {"enabled": True},
        "fleet": {"secretName": "fleet"},
        "sidecar": {"port": 9000},
        "config": {"gateway": {"poll_s": 0.5}, "proxy": {"reattach_s": 60}},
    }
    rendered = chart.render(values)
    file = tmp_path / "gateway.yaml"
    file.write_text(rendered.gateway_settings_file)
    loaded = load(environ={}, file=file).settings
    name, service = rendered.workload["metadata"]["name"], rendered.workload["spec"]["serviceName"]
    assert node_urls(loaded.gateway.nodes) == {
        f"{name}-{index}": f"http://{name}-{index}.{service}:9000" for index in range(2)
    }
    assert (loaded.gateway.poll_s, loaded.proxy.reattach_s, loaded.listen.port) == (0.5, 60, 9000)
    # Both are of one fleet, and read the same secret.
    node = settings_of(rendered, tmp_path).fleet
    assert node == loaded.fleet
    assert (node.coordination, node.group) == ("none", name)
    for pod in rendered.pods:
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        mounts = {m["name"]: m["mountPath"] for container in containers for m in container["volumeMounts"]}
        [volume] = [v for v in pod["volumes"] if v["name"] == "fleet-secret"]
        [item] = volume["secret"]["items"]
        assert loaded.fleet.secret_file == f"{mounts['fleet-secret']}/{item['path']}"
        assert volume["secret"]["defaultMode"] == 0o440


def test_where_a_service_tells_of_nodes_gateways_ask_it(chart: Charts, tmp_path: Path) -> None:
    values = {"gateway": {"enabled": True}, "fleet": {"secretName": "fleet", "coordination": "kubernetes"}}
    rendered = chart.render(values)
    file = tmp_path / "gateway.yaml"
    file.write_text(rendered.gateway_settings_file)
    loaded = load(environ={}, file=file).settings
    assert (loaded.fleet.coordination, loaded.gateway.nodes) == ("kubernetes", "")
    assert settings_of(rendered, tmp_path).fleet == loaded.fleet
    # Then pods need no names that stay.
    assert rendered.workload["kind"] == "Deployment"


@pytest.mark.parametrize(
    ("host", "pod_ip", "expected"),
    [("0.0.0.0", "10.1.2.3", "http://10.1.2.3:8800"), ("::", "fd00::3", "http://[fd00::3]:8800")],
)
def test_a_node_says_where_it_is_reached(chart: Charts, tmp_path: Path, host: str, pod_ip: str, expected: str) -> None:
    rendered = chart.render({"fleet": {"secretName": "fleet"}, "sidecar": {"listenHost": host}})
    variables = {e["name"]: e.get("value", pod_ip) for e in rendered.container("midstream")["env"]}
    environ = {name: value.replace("$(POD_IP)", variables["POD_IP"]) for name, value in variables.items()}
    file = tmp_path / "midstream.yaml"
    file.write_text(rendered.settings_file)
    loaded = load(environ=environ, file=file).settings
    assert node_url(loaded.fleet, loaded.listen.host, "unused") == expected
    alone = chart.render().container("midstream")["env"]
    assert "MIDSTREAM_FLEET_URL" not in {entry["name"] for entry in alone}


def test_a_pod_that_keeps_others_snapshots_is_known_by_the_name_that_its_certificate_has(
    chart: Charts, tmp_path: Path
) -> None:
    values = {"fleet": {"secretName": "fleet"}, "config": {"replicas": PEERS}}
    rendered = chart.render(values)
    variables = {e["name"]: e.get("value", "") for e in rendered.container("midstream")["env"]}
    environ = {name: value.replace("$(POD_NAME)", "chat-midstream-1") for name, value in variables.items()}
    file = tmp_path / "midstream.yaml"
    file.write_text(rendered.settings_file)
    loaded = load(environ=environ, file=file).settings
    url = node_url(loaded.fleet, loaded.listen.host, "unused")
    [headless] = [s for s in rendered.of("Service") if s["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == rendered.workload["spec"]["serviceName"]
    host = f"chat-midstream-1.{headless['metadata']['name']}.some-namespace.svc"
    assert url == f"http://{host}:8800"
    assert peer_at(loaded.replicas.listen, url) == f"peer://{host}:8801"


def test_settings_of_midstream_come_through_whatever_their_size(chart: Charts, tmp_path: Path) -> None:
    # Helm reads numbers as floats, which must not become 6.8719476736e+10.
    config = {
        "tier1": {"bytes": 64 << 30, "tail": "64"},
        "proxy": {"policy": "exact", "keepalive_s": 2.5, "assign_seed": False},
        "log": {"format": "text"},
        "store": {"tail_every_tokens": 1},
    }
    loaded = settings_of(chart.render({"config": config, "store": {"enabled": True}}), tmp_path)
    assert (loaded.tier1.bytes, loaded.tier1.tail) == (64 << 30, "64")
    assert (loaded.proxy.policy, loaded.proxy.keepalive_s, loaded.proxy.assign_seed) == ("exact", 2.5, False)
    assert (loaded.log.format, loaded.store.tail_every_tokens) == ("text", 1)
    assert loaded.store.dir == "/var/lib/midstream/store"
    assert loaded.store.bytes_max < 20 << 30


@pytest.mark.parametrize(
    "path", [p for p in paths(VALUES) if not {"strategy", "requests", "limits"} & set(p[:-1])], ids=".".join
)
def test_a_typo_in_any_value_is_an_error(chart: Charts, path: tuple[str, ...]) -> None:
    wrong: dict[str, Any] = {f"{path[-1]}x": "x"}
    for key in reversed(path[:-1]):
        wrong = {key: wrong}
    with pytest.raises(RenderError, match=f"additional properties '{path[-1]}x' not allowed"):
        chart.render(wrong)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"config": {"proxy": {"keepalives": 1}}}, "additional properties 'keepalives' not allowed"),
        ({"config": {"proxy": {"keepalive_s": "soon"}}}, "got string, want number"),
        ({"config": {"proxy": {"policy": "exactly"}}}, "value must be one of 'best-effort', 'exact', 'off'"),
        ({"config": {"workers": []}}, "additional properties 'workers' not allowed"),
        ({"config": {"supervise": {"stop_timeout_s": 600}}}, "additional properties 'stop_timeout_s' not allowed"),
        ({"engine": {"kind": "vlm"}}, "value must be one of 'vllm', 'sglang'"),
        ({"podSecurity": {"user": 0}}, "minimum: got 0, want 1"),
        ({"replicas": "two"}, "got string, want integer"),
        ({"gpu": {"access": "all"}}, "value must be one of 'visible-devices', 'claim'"),
        (
            {"terminationGracePeriodSeconds": 30},
            r"terminationGracePeriodSeconds is 30, and the end of a pod takes up to 120 s: .* answers would be cut off",
        ),
        ({"drain": {"deadlineSeconds": 600}, "terminationGracePeriodSeconds": 600}, "is 600, .* up to 660 s"),
        ({"engine": {"args": ["--port", "1"]}}, "engine.args has --port, which the chart sets"),
        ({"engine": {"args": ["--host=0.0.0.0"]}}, "engine.args has --host, which the chart sets"),
        ({"engine": {"args": ["--kv-transfer-config", "{}"]}}, "two connectors in one engine are not supported"),
        ({"engine": {"args": ["--data-parallel-size=2"]}}, "cannot be told apart; use engine.count"),
        ({"gpu": {"access": "claim"}}, "gpu.claimTemplate is empty; name a ResourceClaimTemplate"),
        ({"gpu": {"enabled": False}}, "name one for CPUs in engine.image"),
        ({"sidecar": {"port": 8102}, "engine": {"count": 2}}, "sidecar.port 8102 is also the port of engine-1"),
        ({"gateway": {"enabled": True}}, "needs the secret of the fleet, by which nodes know their gateways"),
        ({"gateway": {"enabled": True}, "fleet": {"secretName": "s"}, "replicas": 0}, "a gateway needs nodes"),
        ({"config": {"fleet": {"listen": "0.0.0.0:8802"}}}, "config.fleet.listen is set, .* not supported here yet"),
        ({"config": {"fleet": {"tls_ca": "/ca.crt"}}}, "config.fleet.tls_ca is set, .* not supported here yet"),
        ({"config": {"replicas": {**PEERS, "tls_key": ""}}}, "config.replicas.tls_key is empty: mount a Secret"),
        ({"config": {"replicas": {**PEERS, "listen": "10.0.0.1:8801"}}}, "one address for all pods"),
        ({"config": {"replicas": {**PEERS, "listen": "0.0.0.0:8800"}}}, "has the port of sidecar.port, 8800"),
        ({"config": {"replicas": {**PEERS, "listen": "[::]:8101"}}}, "has the port of engine-0, 8101"),
        ({"config": {"gateway": {"nodes": "x"}}}, "additional properties 'nodes' not allowed"),
        ({"engine": {"port": 65535, "count": 2}}, "engine.port is too high for so many engines"),
        (
            {"fleet": {"coordination": "kubernetes"}, "serviceAccount": {"create": False}},
            "no service account to give its role to",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_words(chart: Charts, values: dict[str, Any], words: str) -> None:
    with pytest.raises(RenderError, match=words):
        chart.render(values)


def test_a_grace_period_that_is_just_long_enough_is_taken(chart: Charts) -> None:
    needed = chart.render().pod["terminationGracePeriodSeconds"]
    assert chart.render({"terminationGracePeriodSeconds": needed}).pod["terminationGracePeriodSeconds"] == needed
    with pytest.raises(RenderError, match="Raise it"):
        chart.render({"terminationGracePeriodSeconds": needed - 1})


def test_the_schema_has_exactly_the_settings_that_midstream_has() -> None:
    import importlib.util
    import json

    spec = importlib.util.spec_from_file_location("settings_schema", DEPLOY / "helm" / "settings_schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    held = json.loads((CHART / "values.schema.json").read_text())["properties"]["config"]
    assert held == module.settings_schema(), "run: python deploy/helm/settings_schema.py"
    assert set(leaves()) >= module.DECIDED


def test_every_value_is_in_the_schema_and_every_property_of_it_has_a_value() -> None:
    import json

    def declared(schema: dict[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
        found = set()
        for key, inner in schema.get("properties", {}).items():
            found |= {(*above, key)} | declared(inner, (*above, key))
        return found

    schema = json.loads((CHART / "values.schema.json").read_text())
    # Helm's own; what a file of settings may hold; what a resource may ask for; the strategy's own fields.
    others = {("global",), ("config",)}
    known = {p for p in declared(schema) if p[:1] not in others and "resources" not in p[:-1]}
    valued = {p for p in paths(VALUES) if p[:1] not in others and p[:1] != ("strategy",)}
    valued = {p for p in valued if "resources" not in p[:-1]}
    assert known == valued | {("strategy",)}


engines = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["vllm", "sglang"]),
        "count": st.integers(1, 8),
        "stopSeconds": st.integers(1, 3600),
        "cpu": st.fixed_dictionaries({"kvCacheGiB": st.integers(1, 65536), "otherGiB": st.integers(1, 65536)}),
    }
)
arenas = st.fixed_dictionaries({"slot_count": st.integers(1, 65536), "page_count": st.integers(16, 1 << 20)})


@settings(max_examples=25)
@given(
    engine=engines,
    arena=arenas,
    tier1=st.integers(0, 1 << 44),
    replicas=st.integers(0, 1 << 44),
    drain=st.fixed_dictionaries({"delaySeconds": st.integers(0, 300), "deadlineSeconds": st.integers(1, 3600)}),
    grace=st.one_of(st.none(), st.integers(1, 8000)),
    on_cpu=st.booleans(),
    store=st.fixed_dictionaries({"enabled": st.booleans(), "sizeGiB": st.integers(1, 1 << 20)}),
)
def test_whatever_the_values_memory_and_time_are_enough(
    chart: Charts,
    tmp_path_factory: pytest.TempPathFactory,
    engine: dict[str, Any],
    arena: dict[str, int],
    tier1: int,
    replicas: int,
    drain: dict[str, int],
    grace: int | None,
    on_cpu: bool,
    store: dict[str, Any],
) -> None:
    values = {
        **merged(CPU if on_cpu else {}, {"engine": engine}),
        "config": {"arena": arena, "tier1": {"bytes": tier1}, "replicas": {"memory_bytes": replicas}},
        "drain": drain,
        "terminationGracePeriodSeconds": grace,
        "store": store,
    }
    used_s = drain["delaySeconds"] + drain["deadlineSeconds"] + engine["stopSeconds"]
    computed_s = chart.render({**values, "terminationGracePeriodSeconds": None}).pod["terminationGracePeriodSeconds"]
    assert used_s < computed_s < used_s + 60
    if grace is not None and grace < computed_s:
        with pytest.raises(RenderError, match="answers would be cut off"):
            chart.render(values)
        return
    rendered = chart.render(values)
    assert rendered.pod["terminationGracePeriodSeconds"] == (grace or computed_s)

    loaded = settings_of(rendered, tmp_path_factory.mktemp("settings"))
    assert loaded.supervise.stop_timeout_s == drain["deadlineSeconds"]
    assert len(loaded.workers) == len(rendered.engines) == engine["count"]

    arena_bytes = Geometry(loaded.arena.slot_count, loaded.arena.page_count).size_bytes
    [run] = [v for v in rendered.pod["volumes"] if v["name"] == "run"]
    assert run["emptyDir"]["medium"] == "Memory"
    room = mebibytes(run["emptyDir"]["sizeLimit"]) * MIB
    assert 3 * engine["count"] * arena_bytes <= room <= 3 * engine["count"] * arena_bytes + 32 * MIB
    sidecar = mebibytes(rendered.container("midstream")["resources"]["limits"]["memory"]) * MIB
    kept = loaded.tier1.bytes + loaded.replicas.memory_bytes
    assert sidecar >= 3 * engine["count"] * arena_bytes + kept + (1 << 30)
    if on_cpu:
        kv = engine["cpu"]["kvCacheGiB"]
        assert mebibytes(rendered.container("holder")["resources"]["limits"]["memory"]) > kv * 1024 * engine["count"]
        assert rendered.engines[0]["resources"]["limits"]["memory"] == f"{kv + engine['cpu']['otherGiB']}Gi"


def mebibytes(quantity: str) -> int:
    found = re.fullmatch(r"(\d+)Mi", quantity)
    assert found is not None, quantity
    return int(found[1])


def test_resources_of_the_users_win_over_what_is_computed(chart: Charts) -> None:
    rendered = chart.render({"sidecar": {"resources": {"limits": {"memory": "9Gi", "cpu": "4"}}}})
    resources = rendered.container("midstream")["resources"]
    assert resources["limits"] == {"memory": "9Gi", "cpu": "4"}
    assert resources["requests"]["cpu"] == "1"
