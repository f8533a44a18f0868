"""A record as text for people: the lines of a verdict, shared by terminal and page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from .record import Status

HEADLINES = {
    Status.PROVEN: "Exact: every interrupted answer was the undisturbed one",
    Status.FAILED: "Not exact",
    Status.STOPPED: "Nothing failed, but it could not go on to its end",
    Status.OPEN: "Nothing failed, but not everything is proven",
}
# Verdicts in the order in which people want to know of them, with what each means.
MEANINGS = {
    "identical": "the interrupted answer is the undisturbed one, to the last field",
    "restore": "the restore changed the answer: a failure",
    "variance": "it differs, and so do undisturbed runs: neither pass nor failure",
    "unsettled": "with these settings no comparison can tell",
    "recomputed": "the sidecar said that it had no KV: nothing lost, and no proof",
    "refused": "the sidecar would not go on: nothing wrong was sent, and no proof",
    "missed": "the answer was through before it could be cut",
}


def headline(told: Mapping[str, Any], status: Status) -> str:
    """The verdict in one sentence, with the reason where it is no pass."""
    if status is Status.FAILED and not told["restore_differences"]:
        return (
            f"{HEADLINES[status]}: only {told['mismatches_planted_found']} of {told['mismatches_planted']} planted "
            "faults were found, so the other verdicts prove nothing"
        )
    if status is Status.FAILED:
        return f"{HEADLINES[status]}: {told['restore_differences']} of {told['cases']} restores changed the answer"
    if status is Status.STOPPED:
        return f"{HEADLINES[status]}: {told['stopped'].splitlines()[0]}"
    if status is Status.OPEN:
        return f"{HEADLINES[status]}: {'; '.join(_open_points(told))}"
    return f"{HEADLINES[status]} ({told['identical']} of {told['cases']})"


def counts(told: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """Verdicts that were given, how often, and what each means."""
    found = {name: told["restore_differences" if name == "restore" else name] for name in MEANINGS}
    return [(n, found[n], MEANINGS[n]) for n in MEANINGS if found[n] or n in ("identical", "restore")]


def facts(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was verified, and with what."""
    identity, settings = told["identity"], told["settings"]
    names = identity["versions"]
    kills = f"{told['kills']} of {told['cases']} interruptions were a real SIGKILL" if told["cases"] else "none"
    return [
        ("GPU", names["gpu"]),
        ("driver", names["driver"]),
        ("engine", names["engine"]),
        ("model", f"{identity['model']} ({names['model']})"),
        ("midstream", identity["midstream"]),
        ("date", identity["date"]),
        ("compared", f"{settings['prompts']} prompts, {settings['cuts']} cuts, {settings['controls']} controls each"),
        ("ways", f"{', '.join(settings['ways'])}; {kills}"),
        ("seed, at a time", f"{settings['seed']}, {settings['concurrency']}"),
        ("took", f"{told['seconds']:.0f} s"),
    ]


def differences(told: Mapping[str, Any]) -> list[dict[str, str]]:
    """A line for each case that is not identical, failures first."""
    order = list(MEANINGS)
    others = [run for run in told["runs"] if run["verdict"] != "identical"]
    lines = []
    for run in sorted(others, key=lambda run: (run["verdict"] != "restore", order.index(run["verdict"]))):
        lines.append(
            {
                "prompt": run["prompt"],
                "cut": f"{run['cut']} ({run['cut_made'] or run['cut_wanted']})",
                "way": run["way"],
                "verdict": run["verdict"],
                "first": _first(run.get("difference")),
                "why": _why(run),
            }
        )
    return lines


def _first(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    if found["first"] is None:
        return f"no token, but {', '.join(found['what'])}"
    return f"token {found['first'] + 1}: {found['wanted']} became {found['got']} ({found['share']:.0%} differ)"


def _why(run: Mapping[str, Any]) -> str:
    parts = [run["why"]]
    if run["detail"]:
        parts.append(run["detail"])
    if top := run.get("top_logprobs"):
        parts.append("undisturbed, likeliest there: " + _tokens(top))
    return "; ".join(parts)


def _tokens(top: Sequence[Sequence[Any]]) -> str:
    return ", ".join(f"{token!r} {logprob:.3f}" for token, logprob in top)


def _open_points(told: Mapping[str, Any]) -> list[str]:
    points = [f"{count} {name}" for name, count, _ in counts(told) if count and name not in ("identical", "restore")]
    if told["unanswered_prompts"]:
        points.append(f"{told['unanswered_prompts']} prompts without an answer")
    if not told["mismatches_planted"]:
        points.append("no fault was planted, so nobody knows whether one would be found")
    if not told["cases"]:
        points.append("nothing was interrupted")
    return points
