"""Imports go down only; what is pure stays pure; what runs inside engines is standard library and the engine."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.parsing import parsed

ROOT = Path(__file__).parents[1]
PACKAGES = ("adapters", "loadtest", "proxy", "session", "sidecar")

# What each package may import, itself aside.
BELOW = {
    "session": set(),
    "proxy": {"session"},
    "adapters": {"session"},
    "loadtest": {"session"},
    "sidecar": {"proxy", "adapters", "loadtest", "session"},
}

# State machines, formats and verdicts: time, chance and the outside world are arguments there.
PURE = (
    "session/cells.py",
    "session/errors.py",
    "session/ids.py",
    "session/key.py",
    "session/layout.py",
    "session/ledger.py",
    "session/manifest.py",
    "session/marker.py",
    "session/records.py",
    "session/retention.py",
    "session/store.py",
    "session/tracker.py",
    "proxy/dialects/hiding.py",
    "proxy/dialects/openai.py",
    "proxy/dialects/openai_edit.py",
    "proxy/eligible.py",
    "proxy/event_ids.py",
    "proxy/headers.py",
    "proxy/report.py",
    "proxy/request.py",
    "proxy/settings.py",
    "proxy/splice.py",
    "proxy/sse.py",
    "proxy/stall.py",
    "proxy/stream_log.py",
    "adapters/cuda_checkpoint/driver.py",
    "adapters/cuda_checkpoint/machine.py",
    "adapters/cuda_checkpoint/preflight.py",
    "adapters/prompt.py",
    "adapters/sglang/reservations.py",
    "adapters/sglang/token_ids.py",
    "adapters/transformers/detokenizer.py",
    "adapters/transformers/extents.py",
    "adapters/vllm/reservations.py",
    "sidecar/cards/health.py",
    "sidecar/cards/xid.py",
    "sidecar/choice.py",
    "sidecar/fleet/backoff.py",
    "sidecar/fleet/fence.py",
    "sidecar/fleet/roster.py",
    "sidecar/mover/counters.py",
    "sidecar/replicas/backlog.py",
    "sidecar/replicas/object_names.py",
    "sidecar/replicas/peer_wire.py",
    "sidecar/replicas/signatures.py",
    "sidecar/replicas/urgency.py",
    "sidecar/supervise.py",
)
OUTSIDE = {
    "aiohttp",
    "asyncio",
    "concurrent",
    "datetime",
    "fcntl",
    "http",
    "mmap",
    "multiprocessing",
    "os",
    "psutil",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "urllib",
    "uuid",
    "uvloop",
}

# What an engine's process loads. Each entry leads to everything that it imports, directly or not.
VLLM_SIDE = sorted(
    f"adapters/vllm/{path.name}"
    for path in (ROOT / "adapters" / "vllm").glob("*.py")
    if path.name not in ("adapter.py", "launch.py")
)
ALWAYS_ENGINE_SIDE = tuple(
    f"session/{name}.py" for name in ("ids", "errors", "marker", "arena", "held", "layout", "key")
)
# Builds of torch for GPUs bring the bindings of CUDA.
VLLM = {"vllm", "torch", "numpy", "cuda", "tokenizers"}
SGLANG_SIDE = sorted(
    f"adapters/sglang/{path.name}" for path in (ROOT / "adapters" / "sglang").glob("*.py") if path.name != "adapter.py"
)
# Its server is made with FastAPI.
SGLANG = {"sglang", "torch", "numpy", "fastapi", "cuda", "pynvml"}
TRANSFORMERS = {"torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy", "aiohttp"}


@dataclass(frozen=True, slots=True)
class Import:
    """One import: `module` is dotted and absolute, midstream's own ones begin with `midstream.`."""

    module: str
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def sources() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def imports(source: str) -> list[Import]:
    """All imports of a file, also those inside functions; those for type checkers alone are left out."""
    tree = parsed(ROOT / source)
    return [found for node in _loaded(tree) for found in _of(node, source)]


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _loaded(child)


def _of(node: ast.AST, source: str) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        assert node.module is not None
        yield Import(node.module, node.lineno)
    elif isinstance(node, ast.ImportFrom):
        package = ("midstream", *Path(source).parent.parts)
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [node.module])))
        for alias in node.names:
            # `from . import x` may name a module or something in the package.
            yield Import(f"{base}.{alias.name}" if _file(f"{base}.{alias.name}") else base, node.lineno)


def _file(module: str) -> str | None:
    path = Path(*module.split(".")[1:])
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / candidate).is_file():
            return str(candidate)
    return None


def closure(source: str) -> dict[str, str]:
    """Every file of midstream that loading `source` loads, and the file that asked for it."""
    found, queue = {source: source}, [source]
    while queue:
        current = queue.pop()
        for one in imports(current):
            if one.top != "midstream":
                continue
            names = {one.module, *(one.module.rsplit(".", cut)[0] for cut in range(1, one.module.count(".")))}
            for file in filter(None, map(_file, names)):
                if file not in found:
                    found[file] = current
                    queue.append(file)
    return found


@pytest.mark.parametrize("source", sources())
def test_imports_go_down_only(source: str) -> None:
    package = source.partition("/")[0]
    for one in imports(source):
        if one.top == "midstream":
            target = one.module.split(".")[1]
            assert target in BELOW[package] | {package}, f"{source}:{one.line} imports {one.module}"
        assert one.top not in PACKAGES, f"{source}:{one.line}: relative imports only, not {one.module}"


@pytest.mark.parametrize("source", [name for name in sources() if not name.startswith(("adapters/", "loadtest/"))])
def test_engines_are_imported_by_their_adapters_alone(source: str) -> None:
    engines = {"vllm", "torch", "transformers", "sglang", "safetensors", "gguf", "tokenizers", "numpy"}
    assert [one for one in imports(source) if one.top in engines] == []


@pytest.mark.parametrize("source", PURE)
def test_what_is_pure_touches_nothing_outside(source: str) -> None:
    touched = [f"{source}:{one.line} imports {one.module}" for one in imports(source) if one.top in OUTSIDE]
    assert touched == []
    calls = {
        n.func.id for n in ast.walk(parsed(ROOT / source)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    }
    assert calls.isdisjoint({"open", "print", "input"})


@pytest.mark.parametrize("source", [*VLLM_SIDE, *ALWAYS_ENGINE_SIDE])
def test_what_runs_inside_vllm_is_standard_library_and_vllm(source: str) -> None:
    assert foreign(source, VLLM) == []


@pytest.mark.parametrize("source", SGLANG_SIDE)
def test_what_runs_inside_sglang_is_standard_library_and_sglang(source: str) -> None:
    assert foreign(source, SGLANG) == []


def test_what_runs_inside_the_embedded_engine_is_standard_library_and_that_engine() -> None:
    assert foreign("adapters/transformers/server.py", TRANSFORMERS) == []


def test_session_is_standard_library_but_for_the_files_that_store_and_that_of_the_gpu() -> None:
    exempt = {"session/chunk.py", "session/disk_store.py", "session/vram.py"}
    for source in sources():
        if source.startswith("session/") and source not in exempt:
            libraries = {one.top for one in imports(source)} - set(sys.stdlib_module_names) - {"midstream"}
            assert libraries == set(), source


def test_cuda_is_loaded_when_it_is_called_for_and_by_no_import() -> None:
    at_import = parsed(ROOT / "session/vram.py").body
    assert [one for node in at_import for one in _of(node, "session/vram.py") if one.top == "cuda"] == []
    assert [one for one in imports("session/vram.py") if one.top == "cuda"] != []


def test_the_holder_loads_nothing_that_could_load_cuda() -> None:
    assert "session/vram.py" not in closure("sidecar/holder.py")


def test_the_command_needs_only_the_standard_library_until_it_has_looked_for_the_rest() -> None:
    loaded = [
        one
        for node in parsed(ROOT / "sidecar/cli.py").body
        for one in _of(node, "sidecar/cli.py")
        if one.top != "midstream" or one.module.startswith("midstream.sidecar")
    ]
    assert {one.top for one in loaded} <= set(sys.stdlib_module_names)


def foreign(source: str, engine: set[str]) -> list[str]:
    """Imports in the closure of `source` that are neither standard library, nor ours, nor the engine's."""
    allowed = set(sys.stdlib_module_names) | {"midstream"} | engine
    return [
        f"{file}:{one.line} imports {one.module} (loaded by {by})"
        for file, by in closure(source).items()
        for one in imports(file)
        if one.top not in allowed
    ]


def test_the_lists_above_name_files_that_exist() -> None:
    missing = [name for name in (*PURE, *ALWAYS_ENGINE_SIDE) if not (ROOT / name).is_file()]
    assert missing == []
    assert "adapters/vllm/plugin.py" in VLLM_SIDE
