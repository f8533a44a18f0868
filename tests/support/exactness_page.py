"""docs/exactness.md as data: its tables, and the tests that their rows name.

Owns the form of a row: a name, a request, a verdict for each engine of its table, and tests, each as
`` `file` [case] ``, `` `file::test` `` or `` `file::test` [case] ``. SGLang has tables of its own. Judges nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "exactness.md"
_TWO = ("vLLM", "embedded")
_SGLANG = ("SGLang",)
_ALL = (*_TWO, *_SGLANG)
# The engines that a table tells of, by the first word of its header.
HEADERS = {"feature": _TWO, "word": _TWO, "case": _ALL, "feature of SGLang": _SGLANG, "word of SGLang": _SGLANG}
NOTHING = "-"
_REFERENCE = re.compile(r"`(?P<path>tests/[\w/]+\.py)(?:::(?P<test>(?:\w+::)?\w+))?`(?: \[(?P<case>[^\]]+)\])?")


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
    told: Mapping[str, str]
    tests: tuple[Reference, ...]

    @property
    def vllm(self) -> str:
        """Its verdict of vLLM."""
        return self.told.get("vLLM", NOTHING)

    @property
    def embedded(self) -> str:
        """Its verdict of the embedded engine."""
        return self.told.get("embedded", NOTHING)

    @property
    def sglang(self) -> str:
        """Its verdict of SGLang."""
        return self.told.get("SGLang", NOTHING)

    def verdicts(self) -> tuple[str, ...]:
        """Of the engines of its table, in their order."""
        return tuple(self.told.values())


class NoRow(ValueError):
    """A line of a table that is no row; the text shows it."""


def tables(text: str) -> dict[str, list[Row]]:
    """The rows of each table, by the first word of its header: several tables may share one."""
    found: dict[str, list[Row]] = {name: [] for name in HEADERS}
    rows: list[Row] | None = None
    engines: tuple[str, ...] = ()
    for line in text.splitlines():
        if not line.startswith("|"):
            rows = None
        elif rows is None:
            header = [cell.strip() for cell in line.strip("|").split("|")]
            engines = HEADERS.get(header[0], ())
            if not engines or header[2:] != [*engines, "test"]:
                raise NoRow(f"a table begins with {line!r}")
            rows = found[header[0]]
        elif not set(line) <= set("|-"):
            rows.append(_row(line, engines))
    return found


def _row(line: str, engines: tuple[str, ...]) -> Row:
    cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
    if len(cells) != 3 + len(engines):
        raise NoRow(f"{len(cells)} cells: {line!r}")
    name, request, *verdicts, tests = cells
    rest = _REFERENCE.sub("", tests).replace(";", "").strip()
    if rest:
        raise NoRow(f"{rest!r} names no test: {line!r}")
    references = tuple(Reference(m["path"], m["test"] or "", m["case"] or "") for m in _REFERENCE.finditer(tests))
    return Row(name.strip("`"), request, dict(zip(engines, verdicts, strict=True)), references)
