"""One request, when it is over: what was measured of it, and the verdict on its tokens. Pure.

Owns the fields of `requests.jsonl`. Times are milliseconds, but for moments, which are seconds after the pass's
beginning.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from .gaps import gaps_of
from .live import Live
from .verdict import Same, judge

_REPORT = re.compile(r"midstream outcome=(\w[\w-]*) takeovers=(\d+)")


@dataclass(frozen=True, slots=True)
class Record:
    """One request. `itls_ms` are the waits between chunks with tokens; `interruptions` what its client or the sidecar
    had to mend."""

    strategy: str
    index: int
    round: int
    planned_at_s: float
    sent_at_s: float
    lateness_ms: float
    ended_at_s: float
    success: bool
    status: int
    error: str
    violations: tuple[str, ...]
    input_len: int
    output_len: int
    ttft_ms: float | None
    tpot_ms: float | None
    itls_ms: tuple[float, ...]
    e2el_ms: float
    finish: str
    session: str
    outcome: str
    interruptions: int
    reasons: tuple[str, ...]
    tiers: tuple[str, ...]
    tokens_recomputed: int
    kv_tokens_loaded: int
    gaps_ms: tuple[float, ...]
    verdict: str
    lost: int
    repeated: int
    first_difference: int
    different_tokens: int
    missing: int
    changed_prefix: bool
    token_ids: tuple[int, ...]

    def told(self) -> dict[str, Any]:
        """As an object of the file."""
        return asdict(self)


def record_of(
    live: Live,
    *,
    strategy: str,
    began_s: float,
    controls: Sequence[Sequence[int]],
    fault_times_s: Sequence[float],
    outcomes: Sequence[Mapping[str, Any]],
) -> Record:
    """The record of a request that is over. `outcomes` are those of its session, as the sidecar told them."""
    answer = live.answer
    violations = tuple(live.violations)
    is_whole = answer.whole and not violations
    told = _REPORT.match(answer.report)
    interruptions = max(len(outcomes), int(told[2]) if told else 0, len(live.broken_s))
    outcome = told[1] if told else ("restarted" if live.broken_s else "")
    ended_s = live.ended_s if live.ended_s is not None else live.sent_s
    usage = answer.usage or {}
    counted = usage.get("completion_tokens")
    verdict = judge(
        live.tokens,
        counted if isinstance(counted, int) else None,
        controls,
        is_whole=is_whole,
        interrupted=interruptions > 0,
    )
    same = verdict.same
    if live.changed_prefix and same is Same.IDENTICAL:
        same = Same.DIFFERENT  # what the client put together is no answer that anybody gave
    times = [mark.at_s for mark in live.marks]
    during = [at_s for at_s in fault_times_s if live.sent_s <= at_s <= ended_s]
    gaps = gaps_of(live.sent_s, live.marks, during, interruptions) if interruptions else []
    tokens_after_first = len(live.tokens) - (live.marks[0].count if live.marks else 0)
    return Record(
        strategy=strategy,
        index=live.ask.index,
        round=live.round,
        planned_at_s=round(live.planned_s - began_s, 4),
        sent_at_s=round(live.sent_s - began_s, 4),
        lateness_ms=_ms(live.sent_s - live.planned_s),
        ended_at_s=round(ended_s - began_s, 4),
        success=is_whole,
        status=answer.status,
        error="" if answer.error is None else str(answer.error)[:500],
        violations=violations,
        input_len=int(usage.get("prompt_tokens") or 0),
        output_len=len(live.tokens),
        ttft_ms=_ms(times[0] - live.sent_s) if times else None,
        tpot_ms=_ms((times[-1] - times[0]) / tokens_after_first) if tokens_after_first > 0 else None,
        itls_ms=tuple(_ms(b - a) for a, b in pairwise(times)),
        e2el_ms=_ms(ended_s - live.sent_s),
        finish=answer.finish,
        session=live.session,
        outcome=outcome,
        interruptions=interruptions,
        reasons=tuple(str(o.get("reason", "")) for o in outcomes),
        tiers=tuple(str(o.get("tier", "")) for o in outcomes),
        tokens_recomputed=sum(int(o.get("tokens_recomputed") or 0) for o in outcomes),
        kv_tokens_loaded=sum(int(o.get("kv_tokens_loaded") or 0) for o in outcomes),
        gaps_ms=tuple(_ms(gap_s) for gap_s in gaps),
        verdict=same.value,
        lost=verdict.lost,
        repeated=verdict.repeated,
        first_difference=verdict.first_difference,
        different_tokens=verdict.different_tokens,
        missing=verdict.missing,
        changed_prefix=live.changed_prefix,
        token_ids=tuple(live.tokens),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
