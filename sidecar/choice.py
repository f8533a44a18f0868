"""Where an interrupted session goes on, and with what: pure decisions.

Invariants: KV is used only where the compatibility keys are equal; whatever the client has is a prefix of what the next
worker is told to re-enter or to regenerate; a session is refused only when nothing less is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..session.key import CompatibilityKey
from ..session.marker import KvSource

# What a worker must share with the old one to continue its text at all, with or without its KV.
SAME_TEXT = ("model", "tokenizer")


class Tier(StrEnum):
    """Where the KV of a restore came from (docs/design.md)."""

    HELD = "held"
    IN_PLACE = "in-place"
    MEMORY = "memory"
    DISK = "disk"
    REPLICA = "replica"
    JOURNAL = "journal"
    NONE = "none"


RANKS_BEHIND = "its ranks had not committed the same step"
COMPUTED_ELSEWHERE = "its snapshot is of KV that was computed again"
KV_TIERS = frozenset({Tier.HELD, Tier.IN_PLACE, Tier.MEMORY, Tier.DISK, Tier.REPLICA})
# What disk must cover beyond memory to be preferred: reading it takes longer than to decode so many tokens.
DISK_AHEAD_TOKENS = 64
# The same of a store elsewhere, beside what there is here.
REPLICA_AHEAD_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of an interrupted session.

    `journal` are the journaled outputs, `delivered` those that the client has. `held_kv`: the pool of its last epoch is
    still held and its blocks are still its own. `kept_kv_len`: positions that are kept in memory, 0 for none;
    `stored_kv_len`: those that a snapshot on disk covers; `replica_kv_len`: those of one in a store elsewhere.
    `held_outputs`: with how many outputs it can go on from that pool, None for all; fewer than were journaled, or none,
    where the ranks of its engine had not all committed the newest ones.
    """

    journal: tuple[int, ...]
    delivered: tuple[int, ...]
    prompt_len: int
    finish: str
    output_max: int | None
    wants_logprobs: bool
    streamed: bool
    held_kv: bool
    stored_kv_len: int
    epoch: tuple[str, int]
    key: CompatibilityKey | None
    held_outputs: int | None = None
    kept_kv_len: int = 0
    replica_kv_len: int = 0
    # What is stored, or elsewhere, was computed again by an owner of which nobody here knows.
    stored_again: bool = False
    replica_again: bool = False
    # The client has text of which nobody sees the ids.
    has_unseen: bool = False
    # Whoever replays the outputs finds the stop string that has ended them.
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that is ready. `adopted` names the epoch whose pool it runs in, `sessions` what it has already."""

    worker: str
    epoch: int
    key: CompatibilityKey | None
    sessions: int
    sessions_max: int
    adopted: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Go on at `candidate`: `outputs` are re-entered, `expected` is what the stream must begin with."""

    candidate: Candidate
    tier: Tier
    outputs: tuple[int, ...]
    expected: tuple[int, ...]
    finish: str = ""
    detail: str = ""
    # Its KV is that of another run than the one that was interrupted.
    of_another_run: bool = False

    @property
    def may_be_exact(self) -> bool:
        """Whether the interrupted run goes on if all goes well, or nobody has anything yet of the one that begins."""
        if self.of_another_run:
            return False
        if self.tier in KV_TIERS or (self.finish and self.outputs):
            return True
        return self.tier is Tier.NONE and not self.expected

    @property
    def kv(self) -> KvSource:
        """The marker's word for the tier: what it comes to in the engine, which copies nothing itself."""
        return _WORDS.get(self.tier, KvSource.NONE)


# An engine waits for what is kept in memory, or elsewhere, just as it does for what is stored.
_WORDS = {
    Tier.HELD: KvSource.HELD,
    Tier.IN_PLACE: KvSource.IN_PLACE,
    Tier.MEMORY: KvSource.DISK,
    Tier.DISK: KvSource.DISK,
    Tier.REPLICA: KvSource.DISK,
}


def known_outputs(journal: Sequence[int], delivered: Sequence[int]) -> tuple[int, ...] | None:
    """The longer of both accounts; None when they contradict each other."""
    short, long = sorted((tuple(journal), tuple(delivered)), key=len)
    return long if long[: len(short)] == short else None


def plan(
    account: Account,
    candidates: Sequence[Candidate],
    *,
    without_kv: bool = False,
    tiers: frozenset[Tier] = frozenset(Tier),
) -> Plan | None:
    """The best way on, or None when no candidate can take the session now.

    `without_kv`: KV was tried and was wrong. `tiers`: where KV may come from.
    """
    if not candidates:
        return None
    outputs = known_outputs(account.journal, account.delivered)
    if outputs is None:
        # The journal is not this session's story: only what the client has seen counts.
        why = "the journal contradicts what was delivered"
        return _recompute(account, account.delivered, candidates, why) or _again(account, candidates)
    finish = account.finish if account.finish in ("stop", "length") else ""
    if not finish and account.output_max is not None and len(outputs) >= account.output_max:
        finish = "length"
    cut = outputs
    if account.wants_logprobs:
        # Logprobs of tokens that were never delivered died with the engine: they are computed again.
        cut = account.delivered if account.streamed else ()
    if finish and outputs and cut == outputs:
        return _ending(account, outputs, candidates, finish)
    if not cut:
        return _again(account, candidates)
    if without_kv:
        return _recompute(account, cut, candidates, "KV was tried") or _again(account, candidates)
    in_step = len(account.journal) >= len(account.delivered)
    return (
        (_with_pool(account, cut, outputs, candidates, tiers) if in_step else None)
        or _from_copy(account, cut, outputs, candidates, tiers)
        or _recompute(account, cut, candidates, _why_no_kv(account, candidates))
        or _again(account, candidates)
    )


def exactly(chosen: Plan, account: Account, candidates: Sequence[Candidate]) -> Plan | None:
    """`chosen` where it may be exact, or else a new run if the client has nothing yet; None: the policy forbids it."""
    if chosen.tier is Tier.NONE and account.has_unseen:
        return None
    ends = chosen.tier is Tier.JOURNAL and account.is_stopped and not account.has_unseen
    if ends or chosen.may_be_exact:
        return chosen
    return None if account.delivered or account.has_unseen else _fresh(account, candidates, ())


def has_any_kv(account: Account, tiers: frozenset[Tier]) -> bool:
    """Whether there is KV that a worker might use, be it one that is still coming."""
    held = account.held_kv and not tiers.isdisjoint((Tier.HELD, Tier.IN_PLACE))
    kept = account.kept_kv_len > 0 and Tier.MEMORY in tiers
    stored = account.stored_kv_len > 0 and Tier.DISK in tiers
    return held or kept or stored or (account.replica_kv_len > 0 and Tier.REPLICA in tiers)


def is_good_enough(chosen: Plan) -> bool:
    """Whether nothing on disk could be better: nobody waits for a disk then."""
    if chosen.tier is Tier.MEMORY:
        return len(chosen.expected) - len(chosen.outputs) <= DISK_AHEAD_TOKENS
    return chosen.tier in (Tier.HELD, Tier.IN_PLACE) or bool(chosen.finish)


def is_near_enough(chosen: Plan) -> bool:
    """Whether nothing elsewhere could be better: nobody asks the network then."""
    behind = len(chosen.expected) - len(chosen.outputs)
    return is_good_enough(chosen) or (chosen.tier in KV_TIERS and behind <= REPLICA_AHEAD_TOKENS)


def others_first(candidates: Sequence[Candidate], account: Account) -> list[Candidate]:
    """For a planned move: workers other than the session's own, if any of these could use its KV."""
    others = [c for c in matching(account.key, candidates) if (c.worker, c.epoch) != account.epoch]
    return others or list(candidates)


def matching(key: CompatibilityKey | None, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The workers that could use KV of that key."""
    if key is None:
        return []
    return [c for c in candidates if c.key is not None and not key.difference(c.key)]


def _roomiest(candidates: Sequence[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (c.sessions - c.sessions_max, c.sessions, c.worker))


def _same_text(account: Account, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Workers of the same model; those whose key is unknown are trusted to be what the operator put side by side."""
    if account.key is None:
        return list(candidates)
    return [c for c in candidates if c.key is None or not set(account.key.difference(c.key)) & set(SAME_TEXT)]


def _with_pool(
    account: Account,
    cut: tuple[int, ...],
    outputs: tuple[int, ...],
    candidates: Sequence[Candidate],
    tiers: frozenset[Tier],
) -> Plan | None:
    fitting = matching(account.key, candidates)
    covered = len(cut) if account.held_outputs is None else min(len(cut), account.held_outputs)
    if not account.held_kv or not fitting or covered < 1:
        return None
    adopted = [c for c in fitting if c.adopted == account.epoch]
    # A session whose blocks lie in a worker's own pool stays there: nothing is copied.
    if adopted and covered == len(outputs) and Tier.IN_PLACE in tiers:
        return Plan(_roomiest(adopted), Tier.IN_PLACE, cut, outputs)
    detail = RANKS_BEHIND if covered < len(cut) else ""
    return Plan(_roomiest(fitting), Tier.HELD, cut[:covered], outputs, detail=detail) if Tier.HELD in tiers else None


def _from_copy(
    account: Account,
    cut: tuple[int, ...],
    outputs: tuple[int, ...],
    candidates: Sequence[Candidate],
    tiers: frozenset[Tier],
) -> Plan | None:
    """From memory; or from disk, or from elsewhere, where that goes so much further that it is worth the time."""
    fitting = matching(account.key, candidates)
    kept = _covered(account, cut, account.kept_kv_len) if Tier.MEMORY in tiers else 0
    stored = _covered(account, cut, account.stored_kv_len) if Tier.DISK in tiers else 0
    replica = _covered(account, cut, account.replica_kv_len) if Tier.REPLICA in tiers else 0
    near = max(kept, stored)
    if not fitting or max(near, replica) < 1:
        return None
    if near < 1 or near + REPLICA_AHEAD_TOKENS < replica:
        return _of_snapshot(_roomiest(fitting), Tier.REPLICA, cut[:replica], outputs, again=account.replica_again)
    if kept >= 1 and kept + DISK_AHEAD_TOKENS >= stored:
        return Plan(_roomiest(fitting), Tier.MEMORY, cut[:kept], outputs)
    return _of_snapshot(_roomiest(fitting), Tier.DISK, cut[:stored], outputs, again=account.stored_again)


def _of_snapshot(
    candidate: Candidate, tier: Tier, cut: tuple[int, ...], outputs: tuple[int, ...], *, again: bool
) -> Plan:
    # One output has no KV of its own yet: what was computed again is the prompt's alone, as in any run.
    again = again and len(cut) > 1
    detail = COMPUTED_ELSEWHERE if again else ""
    return Plan(candidate, tier, cut, outputs, detail=detail, of_another_run=again)


def _covered(account: Account, cut: tuple[int, ...], kv_len: int) -> int:
    """With how many outputs a session can go on that has KV of so many positions; the newest needs none."""
    return min(len(cut), kv_len - account.prompt_len + 1) if kv_len else 0


def _recompute(account: Account, outputs: tuple[int, ...], candidates: Sequence[Candidate], why: str) -> Plan | None:
    """Outputs are re-entered and prefilled; only a plugin can do that."""
    if not outputs:
        return _fresh(account, candidates, ())
    able = [c for c in _same_text(account, candidates) if c.key is not None]
    return Plan(_roomiest(able), Tier.JOURNAL, outputs, outputs, detail=why) if able else None


def _fresh(account: Account, candidates: Sequence[Candidate], expected: tuple[int, ...]) -> Plan | None:
    """The request is run again from its beginning; it must come out as `expected` as far as that goes."""
    able = _same_text(account, candidates)
    return Plan(_roomiest(able), Tier.NONE, (), expected) if able else None


def _again(account: Account, candidates: Sequence[Candidate]) -> Plan | None:
    """Engines without the plugin can only run the request again; what the client has is all that must come out."""
    return _fresh(account, candidates, account.delivered)


def _ending(account: Account, outputs: tuple[int, ...], candidates: Sequence[Candidate], finish: str) -> Plan | None:
    able = [c for c in _same_text(account, candidates) if c.key is not None]
    if able:
        return Plan(_roomiest(able), Tier.JOURNAL, outputs, outputs, finish=finish)
    return _again(account, candidates)


def _why_no_kv(account: Account, candidates: Sequence[Candidate]) -> str:
    if account.key is None:
        return "the old worker said nothing of its key"
    if account.held_outputs is not None and account.held_outputs < 1:
        return RANKS_BEHIND
    if not account.held_kv and account.stored_kv_len == account.kept_kv_len == account.replica_kv_len == 0:
        return "no KV is left of it"
    differing = {name for c in candidates if c.key is not None for name in account.key.difference(c.key)}
    return f"keys differ in {', '.join(sorted(differing))}" if differing else "no KV is left of it"
