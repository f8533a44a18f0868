"""A folder that gives an engine's Python the plugin, and nothing else of this environment.

Owns the folder's content: links to midstream's packages inside a real `midstream/` folder, and the metadata by which
engines find the plugin. With the folder on `PYTHONPATH` nothing needs to be installed beside the engine. The folder is
made complete under another name and then renamed, so that an engine never sees half of it.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from importlib import import_module, metadata
from pathlib import Path

from ..session.errors import EngineError

PACKAGES = ("adapters", "loadtest", "proxy", "session", "sidecar")
# What engines look plugins up by; console scripts and the rest are this environment's own business.
_GROUPS = ("vllm.general_plugins", "sglang.srt.plugins")


def ensure(parent: Path) -> Path:
    """The folder for `PYTHONPATH`, made under `parent` unless it is there already."""
    content = _content()
    digest = hashlib.sha256(repr(sorted(content.items())).encode()).hexdigest()[:12]
    folder = parent / f"plugin-{digest}"
    if folder.is_dir():
        return folder
    parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=".plugin-", dir=parent))
    try:
        _write(making, content)
        os.chmod(making, 0o755)
        os.rename(making, folder)
    except OSError as error:
        shutil.rmtree(making, ignore_errors=True)
        if not folder.is_dir():  # else somebody made it at the same time, with the same content
            raise EngineError(
                f"{folder}: the engine's plugin folder cannot be made ({error}); check state_dir"
            ) from error
    return folder


def engine_environ(parent: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the plugin on the engine's path, before whatever is there."""
    path = [str(ensure(parent)), *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(path)}


def _content() -> dict[str, str]:
    """Where the packages are, and what the metadata says."""
    try:
        found = metadata.distribution("midstream")
    except metadata.PackageNotFoundError as error:
        raise EngineError("midstream is not installed; run: pip install -e '.[sidecar]'") from error
    lines: list[str] = []
    for group in _GROUPS:
        lines.append(f"[{group}]")
        lines += [f"{e.name} = {e.value}" for e in found.entry_points if e.group == group]
    content = {f"midstream/{name}": str(_folder_of(name)) for name in PACKAGES}
    content["version"] = found.version
    content["entry_points"] = "\n".join(lines) + "\n"
    return content


def _folder_of(package: str) -> Path:
    file = import_module(f"midstream.{package}").__file__
    assert file is not None  # each of them has an __init__.py
    return Path(file).resolve().parent


def _write(folder: Path, content: Mapping[str, str]) -> None:
    (folder / "midstream").mkdir()
    for name in PACKAGES:
        (folder / "midstream" / name).symlink_to(content[f"midstream/{name}"], target_is_directory=True)
    information = folder / f"midstream-{content['version']}.dist-info"
    information.mkdir()
    text = f"Metadata-Version: 2.1\nName: midstream\nVersion: {content['version']}\n"
    (information / "METADATA").write_text(text)
    (information / "entry_points.txt").write_text(content["entry_points"])
