"""What a load test leaves in its folder: requests, faults, summary, table, page and plots.

Owns the files' names and their format (docs/loadtest.md). Nothing is computed here.
"""

import csv
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from ...session.errors import ConfigError
from ..redaction import without_secrets
from . import figures
from .page import page
from .passes import Passed
from .plots import draw_plots
from .records import Record
from .run import Options

FORMAT = "midstream-loadtest 1"
_LISTS = ("violations", "itls_ms", "reasons", "tiers", "gaps_ms", "token_ids")


def prepare(folder: Path) -> None:
    """The folder, made if need be. ConfigError when it holds another run, for nothing of that may be mixed in."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "summary.json").exists():
            raise ConfigError(f"{folder}: holds a load test already; name another folder with --out")
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}); name another folder with --out") from error


def summary_of(options: Options, model: str, passed: Sequence[Passed], *, is_complete: bool) -> dict[str, Any]:
    """Everything that is told of a run, but for single requests and faults."""
    strategies = {one.name: one.summary() for one in passed}
    return {
        "format": FORMAT,
        "complete": is_complete,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "midstream": metadata.version("midstream"),
        "host": _host(),
        "model": model,
        "command": without_secrets(options.command or (options.url,)),
        "settings": _settings(options),
        "strategies": strategies,
        "comparison": figures.comparison(strategies),
    }


def _host() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }


def _settings(options: Options) -> dict[str, Any]:
    return {
        "seed": options.seed,
        "workers": options.workers,
        "requests": options.requests,
        "duration_s": options.duration_s,
        "rate": options.rate,
        "arrivals": _arrivals(options),
        "concurrency": options.concurrency,
        "controls": options.controls,
        "prompt_tokens": options.shape.prompt_tokens.text,
        "output_tokens": options.shape.output_tokens.text,
        "temperature": options.shape.temperature,
        "ignore_eos": options.shape.ignore_eos,
        "extra_body": options.shape.extra,
        "dataset_entries": len(options.entries),
        "set": options.settings,
        "faults": [asdict(fault) for fault in options.plan.faults],
        "arena": asdict(options.plan.arena) if options.plan.arena else None,
    }


def _arrivals(options: Options) -> str:
    if options.trace:
        return "trace"
    if options.rate is None:
        return "closed"
    return "poisson" if options.is_poisson else "constant"


def write(folder: Path, summary: Mapping[str, Any], passed: Sequence[Passed]) -> list[Path]:
    """All files; returns their paths."""
    written = [
        folder / name for name in ("requests.jsonl", "faults.jsonl", "requests.csv", "summary.json", "report.html")
    ]
    requests, faults, table, told, report = written
    with requests.open("w", encoding="utf-8") as sink:
        for record in _records(passed):
            sink.write(json.dumps(record.told()) + "\n")
    with faults.open("w", encoding="utf-8") as sink:
        for one in passed:
            for entry in one.faults:
                sink.write(json.dumps({"strategy": one.name, **entry.told()}) + "\n")
    _write_table(table, _records(passed))
    report.write_text(page(summary, passed), encoding="utf-8")
    plots = draw_plots(folder, passed)
    # Last: a folder with a summary is whole.
    told.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return [*written, *plots]


def _records(passed: Sequence[Passed]) -> list[Record]:
    return [record for one in passed for record in one.records]


def _write_table(path: Path, records: Sequence[Record]) -> None:
    """One row a request; of lists, their length or their largest value."""
    with path.open("w", encoding="utf-8", newline="") as sink:
        rows = csv.writer(sink)
        names = [name for name in Record.__slots__ if name not in _LISTS]
        rows.writerow([*names, "violations", "max_itl_ms", "max_gap_ms", "reasons", "tiers"])
        for record in records:
            rows.writerow(
                [
                    *(getattr(record, name) for name in names),
                    len(record.violations),
                    max(record.itls_ms, default=""),
                    max(record.gaps_ms, default=""),
                    " ".join(record.reasons),
                    " ".join(record.tiers),
                ]
            )
