"""Makes midstream importable where nothing can be installed: `python3 loadtest/gpu/place.py FOLDER`.

Owns FOLDER: links to this checkout's packages, the metadata by which engines find the plugin, and the commands
`midstream` and `vllm` in `FOLDER/bin`. With FOLDER on PYTHONPATH and FOLDER/bin on PATH a machine without a package
registry runs both as a user would. Standard library only, and run as a script, for midstream is not there before it.
"""

import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("adapters", "loadtest", "proxy", "session", "sidecar")
# vLLM's wheel is unpacked there as a plain tree, which brings no command.
VLLM = "vllm.entrypoints.cli.main:main"


def place(root: Path, folder: Path) -> list[str]:
    """Fill `folder`, which may have been filled before; returns the lines that a shell needs."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    package = folder / "midstream"
    package.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        link = package / name
        link.unlink(missing_ok=True)
        link.symlink_to(root / name, target_is_directory=True)
    information = folder / f"midstream-{project['version']}.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: midstream\nVersion: {project['version']}\n")
    (information / "entry_points.txt").write_text(_entry_points(project))
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    for name, target in {**project["scripts"], "vllm": VLLM}.items():
        _command(commands / name, target)
    # An empty entry would put the current folder on the path.
    return [
        f'export PYTHONPATH="{folder}${{PYTHONPATH:+:$PYTHONPATH}}"',
        f'export PATH="{commands}:$PATH"',
    ]


def _entry_points(project: dict[str, Any]) -> str:
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {target}" for name, target in points.items()]
    return "\n".join(lines) + "\n"


def _command(path: Path, target: str) -> None:
    module, _, function = target.partition(":")
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
        # Engines start their processes anew and import this file there: only the first one is the command.
        f"if __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: place.py FOLDER")
    print("\n".join(place(ROOT, Path(sys.argv[1]).resolve())))
