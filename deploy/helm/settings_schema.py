"""Writes midstream's own settings into the chart's schema, so that a typo in `config` is an error of `helm install`.

    python deploy/helm/settings_schema.py

Owns the property `config` of values.schema.json and nothing else in it. Run it after a setting was added or changed;
tests/deploy/test_values.py compares both.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from midstream.sidecar.config import description, leaves

FILE = Path(__file__).parent / "midstream" / "values.schema.json"
# What the chart decides, or has a value of its own for; `engine` is for engines that midstream starts itself.
DECIDED = frozenset(
    {
        "state_dir",
        "workers",
        "listen.host",
        "listen.port",
        "engine.worker_count",
        "store.dir",
        "store.bytes_max",
        "supervise.stop_timeout_s",
        "drain.kubernetes_node",
        "fleet.name",
        "fleet.url",
        "fleet.group",
        "fleet.coordination",
        "fleet.secret_file",
        "gateway.nodes",
    }
)


def settings_schema() -> dict[str, Any]:
    """The schema of the value `config`: every setting that the chart does not decide, and no other key."""
    groups: dict[str, Any] = {}
    for key, kind in leaves().items():
        group, separator, name = key.partition(".")
        if key in DECIDED:
            continue
        schema = {**_plain(msgspec.json.schema(kind)), "description": description(kind)}
        if separator:
            groups.setdefault(group, _object({}))["properties"][name] = schema
        else:
            groups[group] = schema
    return {**_object(groups), "description": "Settings of midstream, as docs/configuration.md names them."}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _plain(schema: dict[str, Any]) -> dict[str, Any]:
    # A title of ours is a sentence of the error messages, not a name.
    return {name: value for name, value in schema.items() if name != "title"}


def main() -> None:
    """Write the file anew."""
    schema = json.loads(FILE.read_text())
    schema["properties"]["config"] = settings_schema()
    FILE.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
