"""The record of a verification: one JSON object that says what was compared, with what, and what it came to.

Owns the record's form (docs/verify.md), the totals, the exit status that follows from them, and the comparison of a
record with an engine that runs now. Invariant: nothing but identical answers and found plants makes a pass. Pure but
for reading and writing one file.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ...session.errors import ConfigError
from ...session.key import CompatibilityKey
from ..percentiles import percentile
from ..redaction import without_secrets
from .judge import Verdict
from .verification import Case, Controlled, Findings, Options, advice

KIND = "midstream-verify"
RECORD_VERSION = 1
RECORD_BYTES_MAX = 512 << 20
# Tokens that are shown around the first difference.
WINDOW = 8


class Status(IntEnum):
    """What the exit status of `midstream verify` means, beside 2 (usage)."""

    PROVEN = 0  # every interrupted answer was identical, and every planted fault was found
    FAILED = 1  # a restore changed an answer, or a planted fault was not found; with --check: the record does not hold
    STOPPED = 3  # it could not go on to its end; nothing had failed until then
    OPEN = 4  # nothing failed, and not everything is proven: variance, unsettled, recomputed, refused, missed


@dataclass(frozen=True, slots=True)
class Identity:
    """What was verified: the engine's compatibility key, and what else a reader wants to know of it."""

    key: Mapping[str, Any]
    model: str
    midstream: str
    date: str
    host: Mapping[str, Any]
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Versions:
    """The four versions that a record stands on, as text."""

    gpu: str
    driver: str
    engine: str
    model: str


# Which fields of a key belong to which version; all others are configuration.
_FIELDS = {
    "engine": ("engine", "engine_version", "torch_version"),
    "model": ("model", "tokenizer", "lora", "quantization"),
}


def versions(key: Mapping[str, Any]) -> Versions:
    """GPU (or processor), driver, engine and model of a key."""
    device = str(key.get("device") or "unknown")
    name, separator, driver = device.rpartition("driver ")
    if not separator:
        name, driver = device, "none"
    engine = f"{key.get('engine')} {key.get('engine_version')}"
    if key.get("torch_version"):
        engine += f" (torch {key['torch_version']})"
    return Versions(name.rstrip(" ,"), driver.strip(), engine, str(key.get("model")))


def changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What differs between two keys: `gpu`, `driver`, `engine`, `model`, or the name of a field of the configuration.

    Values are (then, now). Empty when KV of one is valid in the other.
    """
    differing = CompatibilityKey(dict(then)).difference(CompatibilityKey(dict(now)))
    old, new = versions(then), versions(now)
    found: dict[str, tuple[str, str]] = {}
    for name in differing:
        part = next((part for part, fields in _FIELDS.items() if name in fields), "")
        if name == "device":
            for part in ("gpu", "driver"):
                if getattr(old, part) != getattr(new, part):
                    found[part] = (getattr(old, part), getattr(new, part))
        elif part:
            before, after = getattr(old, part), getattr(new, part)
            told = (before, after) if before != after else (f"{name} {then.get(name)}", f"{name} {now.get(name)}")
            found.setdefault(part, told)
        else:
            found[name] = (str(then.get(name)), str(now.get(name)))
    return found


def record(findings: Findings, options: Options, identity: Identity, seconds: float) -> dict[str, Any]:
    """The whole record."""
    return {
        "kind": KIND,
        "v": RECORD_VERSION,
        **totals(findings, options),
        "stopped": findings.stopped,
        "advice": list(advice(findings)),
        "seconds": round(seconds, 1),
        "identity": {
            **asdict(identity),
            "command": without_secrets(identity.command),
            "versions": asdict(versions(identity.key)),
        },
        "settings": {
            "prompts": len(options.prompts),
            "cuts": options.cuts,
            "controls": options.controls,
            "kill_share": options.kill_share,
            "ways": [way.value for way in options.ways],
            "seed": options.seed,
            "concurrency": options.concurrency,
            "faults": [fault.value for fault in options.faults],
        },
        "prompts": [_prompt(controlled) for controlled in findings.controlled],
        "runs": [_case(case) for case in findings.cases],
        "plants": [asdict(planted) for planted in findings.planted],
    }


def totals(findings: Findings, options: Options) -> dict[str, Any]:
    """What it came to, in numbers."""
    verdicts = Counter(case.judgement.verdict for case in findings.cases)
    return {
        "cases": len(findings.cases),
        "identical": verdicts[Verdict.IDENTICAL],
        "variance": verdicts[Verdict.VARIANCE],
        "restore_differences": verdicts[Verdict.RESTORE],
        "unsettled": verdicts[Verdict.UNSETTLED],
        "recomputed": verdicts[Verdict.RECOMPUTED],
        "refused": verdicts[Verdict.REFUSED],
        "missed": verdicts[Verdict.MISSED],
        "unanswered_prompts": sum(bool(controlled.error) for controlled in findings.controlled),
        "kills": sum(bool(case.run.killed) for case in findings.cases),
        "mismatches_planted": len(options.faults),
        "mismatches_planted_found": sum(planted.found for planted in findings.planted),
        "recovery_ms": recovery(findings.cases),
    }


def recovery(cases: Sequence[Case]) -> dict[str, dict[str, float]]:
    """The client's gaps by way, in milliseconds; of answers that went on."""
    by_way: dict[str, list[float]] = {}
    for case in cases:
        if case.run.outcome in ("exact", "recomputed", "restarted"):
            by_way.setdefault(case.task.way.value, []).append(case.run.gap_ms)
    return {way: percentiles(gaps) for way, gaps in sorted(by_way.items())}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Count, p50, p90, p99 and the largest of some values."""
    return {
        "count": len(values),
        **{f"p{percent}": round(percentile(values, percent), 3) for percent in (50, 90, 99)},
        "max": round(max(values, default=0.0), 3),
    }


def status(told: Mapping[str, Any]) -> Status:
    """The exit status of a record."""
    if told["restore_differences"]:
        return Status.FAILED
    if told.get("stopped"):
        return Status.STOPPED
    if told["mismatches_planted_found"] < told["mismatches_planted"]:
        return Status.FAILED
    return Status.PROVEN if told["cases"] and told["identical"] == told["cases"] and not _open(told) else Status.OPEN


def _open(told: Mapping[str, Any]) -> bool:
    # Without plants nobody knows whether a difference would have been noticed.
    return bool(told["unanswered_prompts"]) or not told["mismatches_planted"]


def text(told: Mapping[str, Any]) -> str:
    """A record as it lies in its file."""
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def write(content: str, file: Path) -> None:
    """Write a record or its page, all at once. ConfigError when it cannot be written there."""
    temporary = file.with_name(f".{file.name}.new")
    try:
        temporary.write_text(content, encoding="utf-8")
        temporary.replace(file)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"{file}: {error.strerror or error}; name a file in a folder that you may write to"
        ) from error


def read(file: Path) -> dict[str, Any]:
    """Read a record. ConfigError when it is none, or of another version."""
    try:
        if file.stat().st_size > RECORD_BYTES_MAX:
            raise ConfigError(f"{file}: larger than any record; name a file that --record wrote")
        told = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: {error}; name a file that `midstream verify --record FILE` wrote") from error
    if not isinstance(told, dict) or told.get("kind") != KIND:
        raise ConfigError(f"{file}: not a record of `midstream verify`; name a file that --record wrote")
    if told.get("v") != RECORD_VERSION:
        raise ConfigError(f"{file}: a record of version {told.get('v')!r}, expected {RECORD_VERSION}; verify anew")
    try:
        status(told)
        CompatibilityKey.from_json(told["identity"]["key"])
        str(told["identity"]["midstream"]), str(told["identity"]["date"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file}: the record is damaged ({error!r}); verify anew") from error
    return told


@dataclass(frozen=True, slots=True)
class Check:
    """Whether a record holds for what runs now. `changed`: what differs, (then, now)."""

    proven: bool
    changed: Mapping[str, tuple[str, str]]

    @property
    def holds(self) -> bool:
        """Whether nothing has to be verified anew."""
        return self.proven and not self.changed


def check(told: Mapping[str, Any], key: Mapping[str, Any], midstream: str) -> Check:
    """Compare a record with an engine's key and this midstream."""
    then = told["identity"]
    changed = changes(then["key"], key)
    if then["midstream"] != midstream:
        changed["midstream"] = (str(then["midstream"]), midstream)
    return Check(status(told) is Status.PROVEN, changed)


def _prompt(controlled: Controlled) -> dict[str, Any]:
    body = {k: v for k, v in controlled.prompt.body.items() if k not in ("messages", "prompt")}
    said = controlled.prompt.body.get("messages", controlled.prompt.body.get("prompt"))
    told: dict[str, Any] = {
        "name": controlled.prompt.name,
        "path": controlled.prompt.path,
        "settings": body,
        # So that it can be told whether two records asked the same, without the record giving prompts away.
        "prompt_digest": _digest(said),
        "settling": controlled.how.value,
        "left_out": list(controlled.left_out),
        "error": controlled.error,
    }
    if not controlled.error:
        told |= {
            "prompt_tokens": controlled.prompt_len,
            "output_tokens": controlled.length,
            "answer_digest": _digest(controlled.readings[0].tokens),
            "controls": asdict(controlled.spread),
        }
    return told


def _case(case: Case) -> dict[str, Any]:
    run, judgement = case.run, case.judgement
    told: dict[str, Any] = {
        "prompt": case.prompt,
        "cut": case.task.column,
        "way": case.task.way.value,
        "verdict": judgement.verdict.value,
        "why": judgement.why,
        "cut_wanted": case.at,
        "cut_made": run.journal,
        "tries": case.tries,
        "outcome": run.outcome,
        "tier": run.tier,
        "lag": run.lag,
        "gap_ms": run.gap_ms,
        "detail": run.detail,
        "killed": list(run.killed),
        "session": run.session,
    }
    if judgement.difference is not None:
        told["difference"] = asdict(judgement.difference)
        first = judgement.difference.first
        if first is not None:
            told["got_around"] = list(run.reading.tokens[max(first - WINDOW, 0) : first + WINDOW])
    if case.log:
        told["log"] = list(case.log)
    if case.top:
        told["top_logprobs"] = [list(pair) for pair in case.top]
    return told


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
