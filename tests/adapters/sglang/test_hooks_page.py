"""docs/sglang.md names every function of SGLang that a hook replaces, and none that no hook does."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def patched() -> set[str]:
    """Owner and name of each function that the sources patch."""
    found = set()
    for source in (ROOT / "adapters" / "sglang").glob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            match node:
                case ast.Call(
                    func=ast.Name(id="patch"), args=[ast.Name(id=str(owner)), ast.Constant(value=str(name)), *_]
                ):
                    found.add(f"{owner}.{name}")
                case ast.Call(func=ast.Name(id="patch")):
                    raise AssertionError(f"{source.name}:{node.lineno} patches something that cannot be read here")
    return found


def test_the_page_names_each_patched_function_and_no_other() -> None:
    text = (ROOT / "docs" / "sglang.md").read_text()
    table = text[text.index("## Hooks") : text.index("**Guards**")]
    assert set(re.findall(r"`(\w+\.\w+)`", table)) == patched()
