"""docs/exactness.md as data: its tables, and the tests that their rows name.

Owns the form of a row: five cells, the last of which names tests, each as `` `file` [case] ``, `` `file::test` `` or
`` `file::test` [case] ``. Judges nothing.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "exactness.md"
HEADERS = ("feature", "word", "case")
_REFERENCE = re.compile(r"`(?P<path>tests/[\w/]+\.py)(?:::(?P<test>\w+))?`(?: \[(?P<case>[^\]]+)\])?")


@dataclass(frozen=True, slots=True)
class Reference:
    """Tests of one file: of one name, or of one case, or both."""

    path: str
    test: str
    case: str

    def covers(self, node: str) -> bool:
        """Whether a collected test is one of these."""
        path, _, rest = node.partition("::")
        name, _, case = rest.partition("[")
        case = case.removesuffix("]")
        named = not self.test or name == self.test
        return path == self.path and named and (not self.case or self.case == case or self.case in case.split("-"))


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table."""

    name: str
    request: str
    vllm: str
    embedded: str
    tests: tuple[Reference, ...]

    def verdicts(self) -> tuple[str, str]:
        """Of vLLM, and of the embedded engine."""
        return self.vllm, self.embedded


class NoRow(ValueError):
    """A line of a table that is no row; the text shows it."""


def tables(text: str) -> dict[str, list[Row]]:
    """The rows of each table, by the first word of its header: several tables may share one."""
    found: dict[str, list[Row]] = {name: [] for name in HEADERS}
    rows: list[Row] | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            rows = None
        elif rows is None:
            header = [cell.strip() for cell in line.strip("|").split("|")]
            if len(header) != 5 or header[0] not in HEADERS or header[2:] != ["vLLM", "embedded", "test"]:
                raise NoRow(f"a table begins with {line!r}")
            rows = found[header[0]]
        elif not set(line) <= set("|-"):
            rows.append(_row(line))
    return found


def _row(line: str) -> Row:
    cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
    if len(cells) != 5:
        raise NoRow(f"{len(cells)} cells: {line!r}")
    name, request, vllm, embedded, tests = cells
    rest = _REFERENCE.sub("", tests).replace(";", "").strip()
    if rest:
        raise NoRow(f"{rest!r} names no test: {line!r}")
    references = tuple(Reference(m["path"], m["test"] or "", m["case"] or "") for m in _REFERENCE.finditer(tests))
    return Row(name.strip("`"), request, vllm, embedded, references)
