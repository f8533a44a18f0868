"""One self-contained HTML page of a record: no scripts, no fonts, nothing fetched. Pure.

Owns the page's words and looks. Invariant: the first thing on it is the verdict, and everything that came from prompts,
engines or files is escaped. The plots are `plots.py`, the texts that a terminal shows too are `screen.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from . import plots, screen
from .record import Status, status

_STYLE = """
:root{--bg:#fbfbfa;--card:#fff;--ink:#1c2330;--quiet:#667085;--line:#e4e7ec;--good:#157f5b;--bad:#c0272d;--open:#b26a00;
--identical:#2a9d74;--restore:#d64045;--variance:#e0a82e;--unsettled:#e9c46a;--recomputed:#7a9cc6;--refused:#9aa5b1;
--missed:#8a94a3;--dot:#2f6fb3}
@media (prefers-color-scheme:dark){:root{--bg:#12161d;--card:#1a2029;--ink:#e8ebf0;--quiet:#98a2b3;--line:#2b3340;
--good:#3ecf9a;--bad:#ff6b6f;--open:#f0b44c;--identical:#23805f;--dot:#6ea8e6;--missed:#5b6675}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:960px;margin:0 auto;padding:40px 24px 80px}
h1{font-size:27px;line-height:1.25;margin:6px 0 6px;letter-spacing:-.01em}
h2{font-size:17px;margin:40px 0 4px}
p{margin:6px 0}
.quiet,.eyebrow{color:var(--quiet)}
.eyebrow{font-size:12px;text-transform:uppercase;letter-spacing:.09em}
.hero{border-left:6px solid var(--tone);background:var(--card);padding:22px 26px;border-radius:8px}
.hero h1{color:var(--tone)}
.proven{--tone:var(--good)}.failed{--tone:var(--bad)}.open{--tone:var(--open)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:14px 16px}
.tile b{display:block;font-size:25px;line-height:1.2;font-variant-numeric:tabular-nums}
.tile span{color:var(--quiet);font-size:13px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:16px;margin-top:10px}
.card{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;color:var(--quiet);font-weight:600;font-size:12px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
td.num{text-align:right;font-variant-numeric:tabular-nums}
svg{max-width:100%;height:auto;display:block}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg .axis,svg .mark-label{fill:var(--quiet);font-size:11px}
svg .way{fill:#fff;font-size:11px}svg .sign{fill:#fff;font-weight:700}
svg .grid{stroke:var(--line)}svg .mark{stroke:var(--ink);stroke-width:1.5}
svg .dot{fill:var(--dot);fill-opacity:.55}
svg .none{fill:none;stroke:var(--line)}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;margin:10px 0 0;padding:0;list-style:none;font-size:13px}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
code{font:13px ui-monospace,SFMono-Regular,Menlo,monospace}
"""
_VERDICTS = tuple(screen.MEANINGS)
_WAYS = {
    "kill": "a real SIGKILL of the worker's processes; the session goes on from the memory that was left behind",
    "move": "a planned move to the other worker, from the live KV pool",
    "disk": "a planned move to the other worker, from a snapshot in the disk store",
}
_FAULTS = {
    "flipped-bit": "one bit of one value in one stored block, with matching checksums",
    "shifted-cut": "a snapshot that claims one position more than its KV covers",
    "dropped-penalties": "an answer that goes on as if its own tokens were prompt, so that penalties forget them",
}
_CLASSES = {Status.PROVEN: "proven", Status.FAILED: "failed", Status.OPEN: "open", Status.STOPPED: "open"}


def page(told: Mapping[str, Any]) -> str:
    """The page of a record."""
    verdict = status(told)
    title = f"midstream verify: {verdict.name.lower()}"
    parts = [
        _hero(told, verdict),
        _tiles(told),
        _section("What was verified", _pairs(screen.facts(told))),
        _verdicts(told),
        _gaps(told),
        _planted(told),
        _differences(told),
        _how(told),
    ]
    colours = "".join(f".v-{name}{{fill:var(--{name})}}i.v-{name}{{background:var(--{name})}}" for name in _VERDICTS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{colours}</style></head><body><main>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def _hero(told: Mapping[str, Any], verdict: Status) -> str:
    advice = "".join(f"<p>What to set: {escape(text)}.</p>" for text in told["advice"])
    return (
        f'<div class="hero {_CLASSES[verdict]}"><div class="eyebrow">midstream verify</div>'
        f"<h1>{escape(screen.headline(told, verdict))}</h1>"
        "<p>Answers of a language model were interrupted while they were written, and went on on another worker. Each "
        f"was compared, token by token, with undisturbed answers to the same request.</p>{advice}</div>"
    )


def _tiles(told: Mapping[str, Any]) -> str:
    recovery = told["recovery_ms"]
    tiles = [
        (f"{told['identical']} / {told['cases']}", "interrupted answers identical"),
        (str(told["restore_differences"]), "changed by a restore"),
        (f"{told['mismatches_planted_found']} / {told['mismatches_planted']}", "planted faults found"),
    ]
    tiles += [(f"{figures['p50']:.0f} ms", f"median gap, {way}") for way, figures in recovery.items()]
    inner = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{inner}</div>'


def _verdicts(told: Mapping[str, Any]) -> str:
    prompts = [prompt["name"] for prompt in told["prompts"]]
    cuts = list(dict.fromkeys(run["cut"] for run in told["runs"]))
    given = screen.counts(told)
    legend = "".join(
        f'<li><i class="v-{escape(name)}"></i>{escape(name)} ({count}): {escape(meaning)}</li>'
        for name, count, meaning in given
    )
    plot = plots.matrix(told["runs"], prompts, cuts)
    intro = "<p class='quiet'>One cell for each prompt and cut; in it, how the answer was interrupted there.</p>"
    return _section("Verdicts", f'{plot}<ul class="legend">{legend}</ul>', intro)


def _gaps(told: Mapping[str, Any]) -> str:
    by_way: dict[str, list[float]] = {way: [] for way in told["recovery_ms"]}
    for run in told["runs"]:
        if run["outcome"] in ("exact", "recomputed", "restarted"):
            by_way[run["way"]].append(run["gap_ms"])
    figures = [
        (way, f["count"], *(f"{f[name]:.0f}" for name in ("p50", "p90", "p99", "max")), _WAYS.get(way, ""))
        for way, f in told["recovery_ms"].items()
    ]
    table = _table(("way", "cases", "p50 ms", "p90 ms", "p99 ms", "max ms", "what it is"), figures, numbers=range(1, 6))
    intro = "<p class='quiet'>The longest silence that the client saw in an interrupted answer.</p>"
    return _section("Recovery times", plots.gaps(by_way) + table, intro)


def _planted(told: Mapping[str, Any]) -> str:
    if not told["plants"]:
        return _section(
            "Planted faults", "<p>None were planted: nobody knows whether a fault would have been found.</p>"
        )
    rows = []
    for plant in told["plants"]:
        last = plant["attempts"][-1]
        first = f", first at token {last['first'] + 1}" if last["first"] is not None else ""
        found = f"found{first}" if plant["found"] else "NOT FOUND"
        rows.append((plant["fault"], _FAULTS.get(plant["fault"], ""), found, len(plant["attempts"]), last["where"]))
    intro = (
        "<p class='quiet'>A verdict machine must be able to fail: these faults were put in on purpose. One that "
        "changed no token, or that the sidecar caught by itself, was planted again elsewhere.</p>"
    )
    return _section("Planted faults", _table(("fault", "what it is", "verdict", "attempts", "where"), rows), intro)


def _differences(told: Mapping[str, Any]) -> str:
    lines = screen.differences(told)
    errors = [(p["name"], p["error"]) for p in told["prompts"] if p["error"]]
    parts = []
    if lines:
        names = ("prompt", "cut", "way", "verdict", "first", "why")
        rows = [tuple(line[name] for name in names) for line in lines]
        heads = ("prompt", "cut", "way", "verdict", "first difference", "why")
        parts.append(_section("Everything that is not identical", _table(heads, rows)))
    if errors:
        parts.append(_section("Prompts without an undisturbed answer", _table(("prompt", "why"), errors)))
    return "".join(parts)


def _how(told: Mapping[str, Any]) -> str:
    settings, identity = told["settings"], told["identity"]
    left_out = [f"{p['name']} ({', '.join(p['left_out'])})" for p in told["prompts"] if p["left_out"]]
    cache = settings.get("prefix_cache", "")
    lines = [
        f"Each prompt ran {settings['controls']} times undisturbed first; before a difference was called the restore's "
        "fault, more undisturbed runs had to agree.",
        f"{told['kills']} of {told['cases']} interruptions were a real SIGKILL; the others were cut at the source, by "
        "planned moves.",
        f"{settings['concurrency']} prompt at a time."
        if settings["concurrency"] == 1
        else f"{settings['concurrency']} prompts at a time, so the engine's own variance is in the comparison.",
        f"The engine's prefix cache: {cache}.",
        f"Seed of cuts and ways: {settings['seed']}.",
        "Command: " + " ".join(identity["command"]),
    ]
    if left_out:
        lines.append(f"The engine refused some fields, and these prompts ran without: {'; '.join(left_out)}.")
    inner = "".join(f"<p>{escape(line)}</p>" for line in lines)
    key = _pairs([(name, str(value)) for name, value in sorted(identity["key"].items())])
    return _section("How it was done", inner) + _section("Compatibility key", key)


def _section(title: str, inner: str, intro: str = "") -> str:
    return f'<section><h2>{escape(title)}</h2>{intro}<div class="card">{inner}</div></section>'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><td class="quiet">{escape(name)}</td><td>{escape(value)}</td></tr>' for name, value in pairs)
    return f"<table>{rows}</table>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Iterable[int] = ()) -> str:
    right = set(numbers)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=num' if index in right else ''}>{escape(str(value))}</td>" for index, value in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
