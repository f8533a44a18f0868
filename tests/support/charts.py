"""Helm's own rendering of the chart, in a process of its own, and what tests ask of the manifests.

Owns that process: Helm comes as a library with threads of its own, which must not be in a process that forks. One line
of JSON each way. Run as a program this file is that process.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm" / "midstream"
MISSING = [name for name in ("helm_python", "kubernetes_validate") if find_spec(name) is None]
WHY_MISSING = f"{', '.join(MISSING)} not installed; pip install --group dev has it on Linux x86_64"
# What nobody can know for the user.
LEAST: dict[str, Any] = {"image": {"repository": "example/midstream"}, "engine": {"model": "some/model"}}
NOTES = "NOTES.txt"


class RenderError(Exception):
    """Helm did not render; the text is what a user reads."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The manifests of one release."""

    documents: tuple[dict[str, Any], ...]
    notes: str

    def of(self, kind: str) -> list[dict[str, Any]]:
        """All manifests of a kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        """The only manifest of a kind."""
        [found] = self.of(kind)
        return found

    @property
    def workload(self) -> dict[str, Any]:
        """What makes the pods with engines."""
        [found] = [w for w in (*self.of("Deployment"), *self.of("StatefulSet")) if w is not self.gateway]
        return found

    @property
    def gateway(self) -> dict[str, Any] | None:
        """What makes the gateways, if there are any."""
        return next((d for d in self.of("Deployment") if d["metadata"]["name"].endswith("-gateway")), None)

    @property
    def pods(self) -> list[dict[str, Any]]:
        """What is in the pods of each kind."""
        makers = filter(None, (self.workload, self.gateway))
        return [maker["spec"]["template"]["spec"] for maker in makers]

    @property
    def pod(self) -> dict[str, Any]:
        """What is in a pod."""
        return dict(self.workload["spec"]["template"]["spec"])

    @property
    def containers(self) -> list[dict[str, Any]]:
        """In the order in which they start."""
        return [*self.pod["initContainers"], *self.pod["containers"]]

    @property
    def engines(self) -> list[dict[str, Any]]:
        """The engines' containers."""
        return list(self.pod["containers"])

    def container(self, name: str) -> dict[str, Any]:
        """A container by its name."""
        [found] = [container for container in self.containers if container["name"] == name]
        return found

    @property
    def settings_file(self) -> str:
        """The text of midstream.yaml, in the pods with engines."""
        return self._file_of(self.workload)

    @property
    def gateway_settings_file(self) -> str:
        """The same, in the gateways."""
        assert self.gateway is not None
        return self._file_of(self.gateway)

    def _file_of(self, workload: dict[str, Any]) -> str:
        volumes = workload["spec"]["template"]["spec"]["volumes"]
        [name] = [volume["configMap"]["name"] for volume in volumes if volume["name"] == "config"]
        [held] = [document for document in self.of("ConfigMap") if document["metadata"]["name"] == name]
        return str(held["data"]["midstream.yaml"])


class Charts:
    """Renders the chart."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def render(self, values: dict[str, Any] | None = None, *, name: str = "demo", least: bool = True) -> Rendered:
        """The manifests with these values over the least that is needed. RenderError where Helm refuses."""
        given = merged(LEAST, values or {}) if least else values or {}
        manifests = self._ask({"values": given, "name": name})
        documents: list[dict[str, Any]] = []
        notes = ""
        for path, text in sorted(manifests.items()):
            if path.endswith(NOTES):
                notes = text
            else:
                documents += [document for document in yaml.safe_load_all(text) if document is not None]
        return Rendered(tuple(documents), notes)

    def lint(self, values: dict[str, Any]) -> list[dict[str, Any]]:
        """What `helm lint --strict` has to say."""
        return list(self._ask({"lint": merged(LEAST, values)})["messages"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RenderError(answer["error"])
        return dict(answer["ok"])


@contextmanager
def charts() -> Iterator[Charts]:
    """A process of Helm's for as long as this lasts."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Charts(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()  # which ends it
            process.wait(10)


def validate(rendered: Rendered, version: str) -> None:
    """Hold all manifests against the schemas of a version of Kubernetes, in which no field but the known may stand.

    jsonschema.ValidationError names the field that does not fit. What is not Kubernetes' own is passed over.
    """
    for document in rendered.documents:
        group, _, own_version = document["apiVersion"].rpartition("/")
        if not group or group.endswith(".k8s.io") or "." not in group:
            name = "-".join(filter(None, (document["kind"].lower(), group.partition(".")[0], own_version)))
            _validator(name, version).validate(document)


def newest_version() -> str:
    """The newest Kubernetes whose schemas are there."""
    from kubernetes_validate import latest_version

    return str(latest_version())


@cache
def _validator(name: str, version: str) -> Any:
    # The package's own function reads and resolves two megabytes anew for each manifest.
    from jsonschema.validators import Draft202012Validator
    from kubernetes_validate.utils import schema_contents

    schema = schema_contents(f"kubernetes-json-schema/{_folder(version)}/{name}.json", version)
    return Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version: str) -> Any:
    from kubernetes_validate.utils import schema_contents
    from referencing import Registry, Resource

    contents = schema_contents(f"kubernetes-json-schema/{_folder(version)}/_definitions.json", version)
    return (Resource.from_contents(contents) @ Registry()).crawl()


def _folder(version: str) -> str:
    return f"v{version}-local-strict"


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Both, as Helm lays one file of values over another."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _serve() -> None:
    import helm_python as helm

    with helm.Chart.load(CHART) as chart:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                if "lint" in request:
                    answer: Any = helm.lint(CHART, request["lint"], strict=True)
                else:
                    answer = chart.render(request["values"], name=request["name"], namespace="some-namespace")
                print(json.dumps({"ok": answer}), flush=True)
            except helm.HelmError as error:
                print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    _serve()
