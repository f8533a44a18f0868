"""Parsing Python where tasks may be collected."""

import ast
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def nothing_is_collected() -> Iterator[None]:
    """Keep the garbage meanwhile.

    A task whose failure nobody asked for tells of it when it is collected, and parses its source for that: in Python
    3.11 this breaks a parsing that is under way ("AST constructor recursion depth mismatch"; python/cpython#106905).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parsed(source: Path) -> ast.Module:
    """A file's syntax tree."""
    with nothing_is_collected():
        return ast.parse(source.read_text(encoding="utf-8"))
