"""Checks of what midstream works with: the engine's environment, running workers, a running sidecar, a GPU."""

import json
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..session.errors import EngineError
from .cli_inspect import ask, sidecar_url
from .config import Settings, WorkerUrl
from .doctor import Check, fail, ok, warn
from .plugin_path import engine_environ

TESTED_VLLM = ("0.25.1", "0.32.0")
_IMPORT_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 5.0

# Runs in the engine's own interpreter; prints one line of JSON, last.
_PROBE = """
import importlib.metadata as m, importlib.util as u, json, sys
found = {"python": sys.version.split()[0], "plugin": [], "engines": {}, "installed": None}
try:
    found["installed"] = m.version("midstream")
except m.PackageNotFoundError:
    pass
for name in ("vllm", "sglang", "transformers"):
    if u.find_spec(name) is not None:
        for distribution in (name, name + "-cpu"):
            try:
                found["engines"][name] = m.version(distribution)
                break
            except m.PackageNotFoundError:
                found["engines"].setdefault(name, "unknown")
# Each engine that is there looks its plugins up by a group of its own; SGLang's is loaded with SGLang alone.
groups = [g for e, g in (("vllm", "vllm.general_plugins"), ("sglang", "sglang.srt.plugins")) if e in found["engines"]]
for group in groups or ["vllm.general_plugins"]:
    for point in m.entry_points(group=group, name="midstream"):
        try:
            point.load()
            found["plugin"].append("loaded")
        except Exception as error:
            found["plugin"].append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


def environment(python: str, *, is_attached: bool = False) -> list[Check]:
    """The engine's interpreter runs, has an engine, and finds the plugin.

    On the path that `midstream run` gives it; and, for engines that others start, in its own environment.
    """
    path = shutil.which(python)
    if path is None:
        return [fail("engine", f"{python} cannot be run", "name the engine's interpreter with --engine-python")]
    try:
        with tempfile.TemporaryDirectory(prefix="midstream-doctor-") as folder:
            found = _probe(path, engine_environ(Path(folder), os.environ))
        alone = _probe(path, os.environ)
    except (OSError, ValueError, subprocess.SubprocessError, EngineError) as error:
        return [fail("engine", f"{path}: {_last_line(error)}", "look whether this interpreter starts at all")]
    engines = found["engines"]
    if not engines:
        what = fail(
            "engine",
            f"{path} has neither vllm, sglang nor transformers",
            "name the interpreter that the engine runs on",
        )
    else:
        names = ", ".join(f"{name} {version}" for name, version in engines.items())
        what = ok("engine", f"{path} (Python {found['python']}) has {names}")
    tested = [_vllm_version(engines["vllm"])] if "vllm" in engines else []
    return [what, *tested, _plugin(found["plugin"]), _installed(path, alone, is_attached=is_attached)]


def workers(settings: Settings) -> list[Check]:
    """Each worker that is named answers its health check."""
    return [_worker(worker) for worker in settings.workers]


def sidecar(settings: Settings) -> list[Check]:
    """What a running sidecar says of holder, mover and workers; nothing when none runs."""
    try:
        status = ask(sidecar_url(settings), "/midstream/v1/status")
    except EngineError:
        return [ok("sidecar", f"none runs at {sidecar_url(settings)}")]
    found = [ok("sidecar", f"version {status.get('version', 'unknown')} at {sidecar_url(settings)}")]
    found += [_part(name, status.get(name)) for name in ("holder", "mover")]
    found += [_worker_state(w) for w in status.get("workers", []) if isinstance(w, Mapping)]
    return found


def has_gpu() -> bool:
    """Whether this machine has a GPU that its kernel knows."""
    return bool(_cards())


def gpu() -> Check:
    """Whether there is a GPU; midstream works without one."""
    cards = _cards()
    if not cards:
        return ok("gpu", "none; engines on CPU are kept all the same")
    return ok("gpu", f"{len(cards)} ({', '.join(cards)})")


def _cards() -> list[str]:
    return sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))


def _probe(python: str, environ: Mapping[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [python, "-c", _PROBE],
        env=dict(environ),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=_IMPORT_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise EngineError(done.stderr.strip() or f"exit code {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _vllm_version(version: str) -> Check:
    if version.split("+")[0] in TESTED_VLLM:
        return ok("vllm version", f"{version} is one that was tested")
    return warn(
        "vllm version",
        f"{version} was not tested ({', '.join(TESTED_VLLM)} were)",
        "a hook that does not fit is left out, and sessions are recomputed; use a tested version to be sure",
    )


def _plugin(found: list[str]) -> Check:
    if not found:
        return fail("plugin", "the engine does not find it", "reinstall midstream: its metadata names no plugin")
    if found[0] != "loaded":
        return fail("plugin", f"it cannot be loaded there ({found[0]})", "use Python 3.11 or newer for the engine")
    return ok("plugin", "the engine loads it from the path that `midstream run` gives it")


def _installed(python: str, alone: Mapping[str, Any], *, is_attached: bool) -> Check:
    """Whether an engine that others start, which is given no path, would find the plugin."""
    name, own = "plugin installed", version("midstream")
    remedy = f"in midstream's checkout: {python} -m pip install ."
    if alone["plugin"] == ["loaded"] and alone["installed"] == own:
        return ok(name, f"midstream {own} is in the engine's own environment, as `midstream serve` needs it")
    if alone["plugin"] == ["loaded"]:
        return warn(name, f"midstream {alone['installed']} is in the engine's environment, {own} here", remedy)
    fact = (
        "midstream is not in the engine's own environment: `midstream run` needs nothing there, `midstream serve` does"
    )
    return (fail if is_attached else warn)(name, fact, remedy)


def _worker(worker: WorkerUrl) -> Check:
    name = f"worker {worker.name}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{worker.url}/health", timeout=_ANSWER_TIMEOUT_S) as response:
            return ok(name, f"{worker.url} answers {response.status}")
    except urllib.error.HTTPError as error:
        error.close()
        return warn(name, f"{worker.url}/health answers {error.code}", "wait until the engine has loaded")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return fail(name, f"{worker.url} does not answer ({reason})", "start it, or mend its URL")


def _part(name: str, facts: object) -> Check:
    if not isinstance(facts, Mapping) or facts.get("error"):
        fact = facts.get("error") if isinstance(facts, Mapping) else "the sidecar does not speak of it"
        return fail(name, f"{fact}", "look at the sidecar's log; it starts a new one by itself")
    return ok(name, "reachable")


def _worker_state(worker: Mapping[str, Any]) -> Check:
    name, state = f"worker {worker.get('name')}", worker.get("state")
    detail = f" ({worker['detail']})" if worker.get("detail") else ""
    match state:
        case "ready":
            return _plugin_of(name, worker)
        case "parked":
            return ok(name, f"its GPU is free of it{detail}; `midstream unpark` brings it back")
        case "unreachable":
            return fail(name, f"nobody is there{detail}", "start the engine, or mend its URL")
        case "dead":
            return fail(name, f"is dead{detail}", "start it again, unless midstream does; why it ended is in its log")
        case "failed":
            return fail(
                name, f"has failed{detail}", "look at the engine's last lines in the sidecar's log, mend its command"
            )
        case "stopped" | "draining":
            return warn(name, f"is {state}{detail}", "it takes no new sessions; start it again when it is needed")
    return warn(name, f"is {state}{detail}", "look at the engine's log; wait until it is ready")


def _plugin_of(name: str, worker: Mapping[str, Any]) -> Check:
    if worker.get("key") and worker.get("pools") == []:
        return warn(
            name,
            "is ready and carries the plugin, but its KV is in no held memory: its sessions can only be recomputed",
            "look for `midstream:` in the engine's log; is the holder reachable for it, and this engine supported?",
        )
    if worker.get("key"):
        return ok(name, "is ready and carries the plugin")
    return warn(
        name,
        "is ready, but shows no sign of the plugin: its sessions can only be recomputed",
        "start it through `midstream run`; or, beside `midstream serve`, with the plugin, MIDSTREAM_STATE_DIR and "
        "MIDSTREAM_WORKER",
    )


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
