"""What the chart names exists in midstream (paths, ports, flags, variables, files); it is looked up there."""

import inspect
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from midstream.adapters.contract import EngineAdapter
from midstream.adapters.registry import adapter_named
from midstream.adapters.sglang.obstacles import TESTED_VERSIONS as SGLANG_VERSIONS
from midstream.adapters.vllm.obstacles import TESTED_VERSIONS as VLLM_VERSIONS
from midstream.proxy.server import make_runner
from midstream.session.ticket import TICKET, worker_dir
from midstream.sidecar import api, servants
from midstream.sidecar.cli_app import app
from midstream.sidecar.config import Arena, Restore
from midstream.sidecar.fleet import kubernetes_access, kubernetes_api
from midstream.sidecar.gateway.routes import routes as gateway_routes
from midstream.sidecar.leaving import HOLDER
from midstream.sidecar.state_dir import URL
from midstream.sidecar.workers import Workers
from support.charts import CHART, Charts, Rendered

EVERYTHING = {
    "engine": {"count": 2},
    "sidecar": {"port": 9000},
    "service": {"port": 80},
    "serviceMonitor": {"enabled": True},
    "networkPolicy": {"enabled": True},
    "store": {"enabled": True},
    "gateway": {"enabled": True},
    "fleet": {"secretName": "fleet"},
}


@pytest.fixture(scope="module")
def rendered(chart: Charts) -> Rendered:
    return chart.render(EVERYTHING)


def gateway_of(rendered: Rendered) -> dict[str, Any]:
    assert rendered.gateway is not None
    [container] = rendered.gateway["spec"]["template"]["spec"]["containers"]
    return dict(container)


def state_dir(rendered: Rendered) -> Path:
    return Path(yaml.safe_load(rendered.settings_file)["state_dir"])


def shell(container: dict[str, Any]) -> str:
    """What a container runs in a shell."""
    assert container["command"][:2] == ["/bin/sh", "-c"]
    return str(container["command"][2])


def hook(container: dict[str, Any]) -> str:
    """What runs before a container is told to end."""
    return str(container["lifecycle"]["preStop"]["exec"]["command"][2])


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def test_every_path_that_is_asked_for_is_one_that_the_sidecar_serves(rendered: Rendered) -> None:
    nobody: Any = None
    served = {route.path for route in api.routes(Workers(let_go=lambda _: None), nobody, nobody, nobody)}
    sidecar = rendered.container("midstream")
    probed = {sidecar[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe")}
    gateway = gateway_of(rendered)
    # Whose routes are its own, with the same names.
    at_gateway = {gateway[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert at_gateway <= {str(getattr(route, "path", "")) for route in gateway_routes(nobody, nobody)}
    scraped = {endpoint["path"] for endpoint in rendered.one("ServiceMonitor")["spec"]["endpoints"]}
    assert probed | scraped <= served
    # A process that lives but has no worker must not be killed for it, nor get requests.
    assert (sidecar["readinessProbe"]["httpGet"]["path"], sidecar["livenessProbe"]["httpGet"]["path"]) == (
        "/readyz",
        "/live",
    )


def test_everybody_means_the_port_on_which_the_sidecar_listens(rendered: Rendered) -> None:
    listening = yaml.safe_load(rendered.settings_file)["listen"]["port"]
    sidecar = rendered.container("midstream")
    assert [port["containerPort"] for port in sidecar["ports"]] == [listening] == [9000]
    assert {sidecar[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {listening}
    assert {port["targetPort"] for service in rendered.of("Service") for port in service["spec"]["ports"]} == {
        listening
    }
    gateway = gateway_of(rendered)
    assert yaml.safe_load(rendered.gateway_settings_file)["listen"]["port"] == listening
    assert {gateway[p]["httpGet"]["port"] for p in ("startupProbe", "readinessProbe", "livenessProbe")} == {listening}
    [ingress] = rendered.one("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in ingress["ports"]] == [listening]
    named = {port["name"] for service in rendered.of("Service") for port in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in rendered.one("ServiceMonitor")["spec"]["endpoints"]} <= named


def test_an_engine_waits_for_the_place_that_the_sidecar_offers(rendered: Rendered) -> None:
    probe = rendered.container("midstream")["startupProbe"]["exec"]["command"][2]
    folders = [worker_dir(state_dir(rendered), engine["name"]) for engine in rendered.engines]
    assert re.findall(r"test -s (\S+)", probe) == [str(folder / TICKET) for folder in folders]


def test_engine_and_sidecar_have_the_same_names_for_workers_and_ports(rendered: Rendered) -> None:
    workers = {w["name"]: w["url"] for w in yaml.safe_load(rendered.settings_file)["workers"]}
    assert len(workers) == 2
    for engine in rendered.engines:
        arguments = engine["args"]
        host, port = (arguments[arguments.index(flag) + 1] for flag in ("--host", "--port"))
        assert workers[variables(engine)["MIDSTREAM_WORKER"]] == f"http://{host}:{port}"
        assert engine["livenessProbe"]["exec"]["command"][-1] == port


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_engine_is_given_what_its_adapter_says(chart: Charts, kind: str) -> None:
    adapter: EngineAdapter = adapter_named(kind)
    rendered = chart.render({"engine": {"kind": kind, "args": ["--one", 1]}})
    [engine] = rendered.engines
    asked = adapter.attach("engine-0", state_dir(rendered))
    assert asked.env.items() <= variables(engine).items()
    [flag, *value] = asked.argv[:2]
    at = engine["args"].index(flag)
    if kind == "vllm":
        assert yaml.safe_load(engine["args"][at + 1]) == yaml.safe_load(value[0])
    else:
        assert engine["args"][at : at + len(asked.argv)] == list(asked.argv)
    assert engine["args"][-2:] == ["--one", "1"]
    assert adapter.recognises([*engine["command"], *engine["args"]])
    assert f"%s{adapter.health().path}" in engine["livenessProbe"]["exec"]["command"][2]


def test_flags_of_the_users_are_not_given_twice(chart: Charts) -> None:
    [engine] = chart.render({"engine": {"kind": "sglang", "args": ["--page-size=32"]}}).engines
    assert [word for word in engine["args"] if "page-size" in word] == ["--page-size=32"]


def test_a_command_of_the_users_gets_the_same_flags(chart: Charts) -> None:
    usual = chart.render().engines[0]
    own = chart.render({"engine": {"command": ["/opt/start", "vllm", "serve"], "model": ""}}).engines[0]
    assert own["command"] == ["/opt/start", "vllm", "serve"]
    assert own["args"] == usual["args"]


@pytest.mark.parametrize(("kind", "versions"), [("vllm", VLLM_VERSIONS), ("sglang", SGLANG_VERSIONS)])
def test_the_engines_usual_image_is_of_a_tested_version(chart: Charts, kind: str, versions: tuple[str, ...]) -> None:
    image = chart.render({"engine": {"kind": kind}}).engines[0]["image"]
    assert image.partition(":")[2].removeprefix("v") in versions


def test_the_commands_that_are_run_have_these_words(rendered: Rendered) -> None:
    command = re.search(r"exec (.*)", shell(rendered.container("midstream")))
    assert command is not None
    sidecar, gateway = rendered.container("midstream"), gateway_of(rendered)
    root: Any = get_command(app)
    for container, words in ((sidecar, shlex.split(command[1])), (gateway, gateway["command"])):
        [program, verb, flag, file] = words
        options = [name for parameter in root.commands[verb].params for name in parameter.opts]
        assert (program, flag in options) == ("midstream", True)
        [mount] = [m for m in container["volumeMounts"] if m["name"] == "config"]
        assert Path(file) == Path(mount["mountPath"]) / "midstream.yaml"

    module = re.search(r"python -m (\S+) --socket (\S+)", shell(rendered.container("holder")))
    assert module is not None
    assert find_spec(module[1]) is not None
    assert Path(module[2]) == state_dir(rendered) / HOLDER
    assert rendered.container("holder")["startupProbe"]["exec"]["command"] == ["test", "-S", module[2]]


def test_engines_wait_for_the_file_by_which_a_sidecar_says_where_it_listens(rendered: Rendered) -> None:
    folder = state_dir(rendered)
    for engine in rendered.engines:
        assert f"cd {folder.parent} " in hook(engine)
        assert f"[ -e {folder.name}/{URL} ]" in hook(engine)


def test_the_store_lies_in_its_volume(rendered: Rendered) -> None:
    [mount] = [m for m in rendered.container("midstream")["volumeMounts"] if m["name"] == "store"]
    assert Path(yaml.safe_load(rendered.settings_file)["store"]["dir"]).is_relative_to(mount["mountPath"])


def test_the_sidecar_has_the_time_that_its_end_can_take(chart: Charts) -> None:
    def grace_s(drain: dict[str, int], stop_s: int) -> int:
        return int(
            chart.render({"drain": drain, "engine": {"stopSeconds": stop_s}}).pod["terminationGracePeriodSeconds"]
        )

    handlers_s = inspect.signature(make_runner).parameters["shutdown_timeout_s"].default
    mover_s = holder_s = servants.KILL_TIMEOUT_S
    assert grace_s({"delaySeconds": 0, "deadlineSeconds": 1}, 1) - 2 >= handlers_s + mover_s + holder_s


def test_what_holds_without_a_setting_is_what_the_chart_reckons_with() -> None:
    sizes = (CHART / "templates" / "_sizes.tpl").read_text()
    assert f'"slot_count" {Arena().slot_count} ' in sizes
    assert f'"page_count" {Arena().page_count} ' in sizes
    assert f"for {Restore().takeover_timeout_s:g} s at most" in (CHART / "templates" / "NOTES.txt").read_text()


def test_the_sidecar_may_do_with_leases_what_it_does_and_finds_its_credentials(chart: Charts) -> None:
    rendered = chart.render({"fleet": {"coordination": "kubernetes"}})
    asked = re.search(
        r"needs (.*?) for leases\.(\S+) in", inspect.getsource(kubernetes_api).replace('"\n            "', "")
    )
    assert asked is not None
    [rule] = rendered.one("Role")["rules"]
    assert set(rule["verbs"]) == set(re.split(r", | and ", asked[1]))
    assert (rule["apiGroups"], rule["resources"]) == ([asked[2]], ["leases"])

    [volume] = [v for v in rendered.pod["volumes"] if v["name"] == "token"]
    sources = volume["projected"]["sources"]
    items = [item["path"] for source in sources for kind in source.values() for item in kind.get("items", [kind])]
    assert set(items) == set(re.findall(r'account / "(\S+?)"', inspect.getsource(kubernetes_access)))
    [mount] = [m for m in rendered.container("midstream")["volumeMounts"] if m["name"] == "token"]
    assert Path(mount["mountPath"]) == kubernetes_access._ACCOUNT
