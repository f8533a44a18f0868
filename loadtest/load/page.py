"""The report as one page that needs nothing else: tables, and plots as inline SVG.

Owns the HTML. Everything that comes from outside is escaped; no script, no reference to any other file.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .passes import Passed
from .series import tokens_per_second
from .svg import Mark, curves, distributions

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:64rem;padding:0 1rem;color:#1c2330}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem}
table{border-collapse:collapse;margin:.6rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #dde2ea}
td:first-child,th:first-child{text-align:left}
.big{display:flex;gap:2.5rem;flex-wrap:wrap;margin:1.2rem 0}.big b{display:block;font-size:1.9rem}
code{background:#f0f2f6;padding:.1rem .3rem;overflow-wrap:anywhere}.note{color:#5a6578}
"""
_ROWS: tuple[tuple[str, str], ...] = (
    ("requests", "streams"),
    ("answered whole", "completed"),
    ("failed", "failed"),
    ("faults that hit", "faults"),
    ("streams interrupted", "interrupted"),
    ("tokens lost", "lost"),
    ("tokens repeated", "repeated"),
    ("interrupted, identical to the undisturbed answer", "identical"),
    ("interrupted, different", "different"),
    ("interrupted, within variance", "variance"),
    ("undisturbed, different", "different_undisturbed"),
    ("gap p50, ms", "p50_gap_ms"),
    ("gap p90, ms", "p90_gap_ms"),
    ("gap p99, ms", "p99_gap_ms"),
    ("gap max, ms", "max_gap_ms"),
    ("TTFT median, ms", "median_ttft_ms"),
    ("TTFT p99, ms", "p99_ttft_ms"),
    ("TPOT median, ms", "median_tpot_ms"),
    ("ITL median, ms", "median_itl_ms"),
    ("ITL p99, ms", "p99_itl_ms"),
    ("tokens a second", "output_throughput"),
    ("requests a second", "request_throughput"),
    ("generator late p99, ms", "p99_lateness_ms"),
)


def page(summary: Mapping[str, Any], passed: Sequence[Passed]) -> str:
    """The whole page."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>midstream load test</title>",
        f"<style>{_STYLE}</style><h1>What clients saw while workers were killed</h1>",
        f"<p>{_text(summary['date'])}, midstream {_text(summary['midstream'])}, model {_text(summary['model'])}, "
        f"{_text(summary['host']['platform'])}, {_text(summary['host']['cpu_count'])} CPUs.<br>"
        f"<code>{_text(' '.join(summary['command']))}</code></p>",
        "" if summary["complete"] else "<p><b>This run was ended early; what follows is a part of it.</b></p>",
        _headline(summary),
        "<h2>The client's gap</h2><p class=note>How long an interrupted stream was silent. Each dot is one "
        "interruption; the bar is the median.</p>",
        distributions({p.name: [g for r in p.records for g in r.gaps_ms] for p in passed}, "ms"),
        "<h2>Side by side</h2>",
        _table(summary["strategies"]),
        "<h2>Tokens at the clients</h2><p class=note>Tokens a second; dotted lines are faults.</p>",
        *(_over_time(one) for one in passed if one.records),
        "<h2>Inter-token latency</h2>",
        distributions({p.name: [i for r in p.records for i in r.itls_ms] for p in passed}, "ms"),
        "<h2>Time to first token</h2>",
        distributions({p.name: [r.ttft_ms for r in p.records if r.ttft_ms is not None] for p in passed}, "ms"),
        _faults(passed),
        _outcomes(summary["strategies"]),
        "<h2>Settings</h2><table>",
        *(
            f"<tr><td>{_text(k)}<td>{_text(v)}"
            for k, v in summary["settings"].items()
            if k not in ("faults",) and v not in (None, {}, [])
        ),
        "</table></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _headline(summary: Mapping[str, Any]) -> str:
    kv = summary["strategies"].get("kv")
    if not kv:
        return ""
    shown = [
        (str(kv["lost"]), "tokens lost"),
        (str(kv["repeated"]), "tokens repeated"),
        (f"{kv['p50_gap_ms']:.0f} ms", f"gap, median of {kv['gaps']}"),
    ]
    for name in ("recompute", "restart"):
        times = summary["comparison"].get(f"p50_gap_{name}_over_kv")
        if times:
            shown.append((f"{times:.1f} x", f"the gap of {name}"))
    return "<div class=big>" + "".join(f"<div><b>{_text(a)}</b>{_text(b)}</div>" for a, b in shown) + "</div>"


def _table(strategies: Mapping[str, Mapping[str, Any]]) -> str:
    head = "<tr><th>" + "".join(f"<th>{_text(name)}" for name in strategies)
    rows = [
        f"<tr><td>{_text(label)}" + "".join(f"<td>{_number(told.get(key))}" for told in strategies.values())
        for label, key in _ROWS
    ]
    return f"<table>{head}{''.join(rows)}</table>"


def _over_time(one: Passed) -> str:
    marks = [Mark(entry.at_s, entry.kind) for entry in one.faults if entry.hit]
    return f"<p>{_text(one.name)}</p>" + curves(list(enumerate(tokens_per_second(one.records))), marks, "s", "tokens/s")


def _faults(passed: Sequence[Passed]) -> str:
    rows = [
        f"<tr><td>{_text(one.name)}<td>{entry.number}<td>{_text(entry.kind)}<td>{entry.at_s:g}<td>{_text(entry.worker)}"
        f"<td>{'yes' if entry.hit else 'no'}<td>{entry.decoding}<td>{entry.prefilling}<td>{_text(entry.detail)}"
        for one in passed
        for entry in one.faults
    ]
    if not rows:
        return ""
    head = "<tr><th>strategy<th>fault<th>kind<th>at, s<th>worker<th>hit<th>decoding<th>prefilling<th>detail"
    return f"<h2>Faults</h2><table>{head}{''.join(rows)}</table>"


def _outcomes(strategies: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{_text(name)}<td>{_text(field)}<td>{_text(', '.join(f'{k}: {v}' for k, v in told[field].items()))}"
        for name, told in strategies.items()
        for field in ("outcomes", "tiers", "reasons")
        if told.get(field)
    ]
    return f"<h2>What the sidecar says of its takeovers</h2><table>{''.join(rows)}</table>" if rows else ""


def _text(value: object) -> str:
    return escape(str(value))


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return "" if value is None else _text(value)
