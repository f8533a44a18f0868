"""Workers of two ranks: sessions move between them, survive the loss of one, and never get what it had not done.

What is marked `apart` runs by `make test-tp`: three ways in which KV comes back, ten interruptions in each.
"""

import asyncio
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from midstream.loadtest.client import Answer
from midstream.loadtest.harness import Victim, kill_worker
from midstream.session.errors import Refused
from midstream.session.held import HolderClient
from midstream.session.ids import SessionId
from midstream.sidecar.control_client import ControlClient
from support import lagging_rank
from support.even_model import even
from support.vllm_rig import (
    ASK_REPORT,
    COMPLETIONS,
    OVER,
    Case,
    Rig,
    chat,
    completion,
    require_same,
    undisturbed,
    whole_model,
)

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(900)]

RANKS = 2
WAIT_S = 120.0
STORY = "Write a long story about a dog named Max."
CASES = (
    Case(chat(STORY, max_tokens=240, ignore_eos=True)),
    Case(completion(STORY, max_tokens=240, ignore_eos=True, presence_penalty=0.6), COMPLETIONS),
    Case(chat(STORY, max_tokens=240, ignore_eos=True, temperature=0.7, top_k=40, seed=11)),
)
# Long enough to be moved before it ends.
LONG = tuple(replace(case, body={**case.body, "max_tokens": 700}) for case in CASES[:2])
OFTEN = {"store.snapshot_every_s": 0.05, "store.tail_every_tokens": 4}
# From where alone KV may come; taken there often enough.
SETTINGS: dict[str, dict[str, object]] = {
    "held": {"store.snapshot_every_s": 0.05},
    "memory": {"restore.tiers": "memory", "tier1.bytes": 256 << 20, "tier1.tail": 4, **OFTEN},
    "disk": {"restore.tiers": "disk", **OFTEN},
}
# What a session that may be taken up in two ways can have come from.
FROM = {"held": ("held", "in-place"), "memory": ("memory",), "disk": ("disk",)}
RANK, MOVE = "a rank", "a move"
INTERRUPTIONS = (RANK, RANK, RANK, RANK, Victim.CORE, Victim.ROOT, Victim.TREE, MOVE, MOVE, MOVE)


class Group:
    """A sidecar with two workers of RANKS ranks, and the word at which a rank of theirs lags."""

    def __init__(self, folder: Path, tier: str) -> None:
        self.tier = tier
        self._word = folder / "word"
        self._wanted: dict[int, Answer] = {}
        self.rig = Rig(
            "--tensor-parallel-size", str(RANKS), "--max-num-seqs", "4",
            workers=2,
            model=even(whole_model(), folder / "model"),
            settings=SETTINGS[tier],
            environ=lagging_rank.plant(folder / "plant", self._word),
        )  # fmt: skip
        self.rig.sidecar.store = folder / "store"

    async def wanted(self, http: aiohttp.ClientSession, cases: Sequence[Case]) -> list[Answer]:
        """What the answers are when nothing happens; each is asked for once."""
        for case in cases:
            if id(case) not in self._wanted:
                [self._wanted[id(case)]] = await undisturbed(self.rig, http, [case])
        return [self._wanted[id(case)] for case in cases]

    async def worker_of(self, http: aiohttp.ClientSession, session: str) -> dict[str, Any]:
        """The worker that has a session."""
        [told] = [s for s in await self.rig.sidecar.sessions(http) if s["session"] == session]
        [worker] = [w for w in await self.rig.sidecar.workers(http) if w["name"] == told["worker"]]
        return worker

    def kill_rank(self, worker: dict[str, Any], rank: int) -> None:
        """SIGKILL one rank of a worker, which nobody but the kernel is told."""
        holder = HolderClient(self.rig.sidecar.state_dir / "holder.sock")
        fd, meta = holder.get(worker["pools"][rank])
        os.close(fd)
        os.kill(int(meta["owner"]["pid"]), signal.SIGKILL)

    def shared_memory(self, worker: dict[str, Any]) -> list[Path]:
        """What the processes of a worker have mapped of it."""
        root = psutil.Process(worker["pid"])
        maps = [Path(f"/proc/{p.pid}/maps").read_text() for p in (root, *root.children(recursive=True))]
        return [Path(name) for name in sorted(set(re.findall(r"/dev/shm/psm_\w+", "".join(maps))))]

    def let_lag(self, worker: dict[str, Any], rank: int) -> None:
        """Have a rank of a worker lag in one of its next steps, and die in the one after that."""
        draft = self._word.with_suffix(".draft")
        draft.write_text(f"{worker['name']} {rank}")
        draft.rename(self._word)

    async def move(self, session: str) -> None:
        """To the other worker, from this group's tier, as soon as it has something there."""
        deadline_s = time.monotonic() + WAIT_S
        async with ControlClient(self.rig.sidecar.state_dir) as control:
            while True:
                try:
                    if self.tier == "disk":
                        await control.snapshot(SessionId(session))
                    await control.move(SessionId(session), tier=self.tier)
                    return
                except Refused as refused:
                    if refused.reason in OVER or time.monotonic() > deadline_s:
                        raise
                    await asyncio.sleep(0.02)

    def stop(self) -> None:
        self.rig.stop()


@pytest.fixture(
    scope="module",
    params=["held", pytest.param("memory", marks=pytest.mark.apart), pytest.param("disk", marks=pytest.mark.apart)],
)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """Workers whose sessions' KV comes from the pools that are held, or from one other tier alone."""
    group = Group(tmp_path_factory.mktemp("ranks"), request.param)
    try:
        group.rig.start()
        yield group
    finally:
        group.stop()


async def of_newest(group: Group, http: aiohttp.ClientSession, known: set[str]) -> str:
    """The session that was not there before."""
    deadline_s = time.monotonic() + WAIT_S
    while not (new := {s["session"] for s in await group.rig.sidecar.sessions(http)} - known):
        assert time.monotonic() < deadline_s, "it did not become a session"
        await asyncio.sleep(0.01)
    [session] = new
    return str(session)


async def disturbed(
    group: Group,
    http: aiohttp.ClientSession,
    cases: Sequence[Case],
    cut: int,
    disturb: Callable[[Sequence[str]], Coroutine[Any, Any, None]],
) -> tuple[list[Answer], list[list[dict[str, Any]]]]:
    """All answers, with something done to the sessions' workers once the first has `cut` outputs; and all outcomes."""
    await group.rig.ready(http)
    doing: list[asyncio.Task[None]] = []
    sessions: list[str] = []

    def at_cut(answer: Answer) -> Any:
        if not doing and len(answer.token_ids) >= cut and len(sessions) == len(cases):
            doing.append(asyncio.create_task(disturb(tuple(sessions))))
        return None

    running: list[asyncio.Task[Answer]] = []
    for case in cases:
        known = {s["session"] for s in await group.rig.sidecar.sessions(http)}
        more = {} if running else {"on_tokens": at_cut}
        running.append(asyncio.create_task(group.rig.ask(http, case, headers=ASK_REPORT, **more)))
        sessions.append(await of_newest(group, http, known))
    answers = await asyncio.gather(*running)
    assert doing, "the first answer ended before anything was done"
    await doing[0]
    told = {s["session"]: s["outcomes"] for s in await group.rig.sidecar.sessions(http)}
    return answers, [told[session] for session in sessions]


def check(
    group: Group,
    cases: Sequence[Case],
    wanted: Sequence[Answer],
    got: Sequence[Answer],
    outcomes: Sequence[list[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Each answer is what it would have been, and what was interrupted went on with KV; returns what that came to."""
    found = []
    for case, plain, answer, told in zip(cases, wanted, got, outcomes, strict=True):
        # An owner that was lost before it wrote anything counts for nothing.
        came_to = [outcome for outcome in told if outcome["outcome"] != "interrupted"]
        assert [o["outcome"] for o in came_to] in ([], ["exact"]), told
        assert all(o["tier"] in FROM[group.tier] and o["kv_tokens_loaded"] > 0 for o in came_to), told
        require_same([case], [plain], [answer], takeovers=len(came_to))
        found += came_to
    assert found, "nobody was interrupted"
    return found


@pytest.mark.apart
async def test_the_model_of_these_tests_says_what_hangs_on_all_that_was_said(
    group: Group, http: aiohttp.ClientSession
) -> None:
    await group.rig.ready(http)
    ask = group.rig.ask
    one = await ask(http, Case(completion("A dog named Max was", ignore_eos=True), COMPLETIONS))
    other = await ask(http, Case(completion("A cat named Max was", ignore_eos=True), COMPLETIONS))
    # It neither repeats itself nor forgets: a word apart at their beginning, they have little in common at their end.
    assert len(set(one.token_ids)) > 15, one.token_ids
    assert len(set(one.token_ids[-20:]) & set(other.token_ids[-20:])) < 10, (one.token_ids, other.token_ids)


async def test_a_rank_that_is_killed_at_any_moment_takes_nothing_with_it(
    group: Group, http: aiohttp.ClientSession, record_property: Callable[[str, object], None]
) -> None:
    wanted = await group.wanted(http, CASES)
    chance = random.SystemRandom()
    moment, rank = chance.uniform(0.0, 0.2), chance.randrange(RANKS)
    record_property("moment", (moment, rank))

    left: list[Path] = []

    async def kill(sessions: Sequence[str]) -> None:
        worker = await group.worker_of(http, sessions[0])
        left.extend(group.shared_memory(worker))
        await asyncio.sleep(moment)
        group.kill_rank(worker, rank)

    got, outcomes = await disturbed(group, http, CASES, 20, kill)
    came_to = check(group, CASES, wanted, got, outcomes)
    # What the ranks had in common has gone with them: a machine that sees many deaths would run out of it.
    await group.rig.ready(http)
    assert left
    assert not [path for path in left if path.exists()]
    if group.tier == "held":
        # The executor reads the replies of all ranks: what was journaled they have all done.
        assert {o["lag"] for o in came_to} == {0}, came_to


@pytest.mark.apart
async def test_ten_interruptions_of_all_kinds_in_a_row_change_no_answer(
    group: Group, http: aiohttp.ClientSession
) -> None:
    chance = random.SystemRandom()
    kinds = list(INTERRUPTIONS)
    chance.shuffle(kinds)
    gaps: dict[str, list[float]] = {}
    done, tiers = 0, []
    for kind in kinds:
        cases = LONG if kind == MOVE else CASES
        wanted = await group.wanted(http, cases)
        moment, rank, cut = chance.uniform(0.0, 0.2), chance.randrange(RANKS), chance.randrange(12, 120)

        async def interrupt(
            sessions: Sequence[str], kind: str = kind, moment: float = moment, rank: int = rank
        ) -> None:
            await asyncio.sleep(moment)
            match kind:
                case "a move":
                    await group.move(sessions[0])
                case "a rank":
                    group.kill_rank(await group.worker_of(http, sessions[0]), rank)
                case victim:
                    kill_worker((await group.worker_of(http, sessions[0]))["pid"], Victim(victim))

        got, outcomes = await disturbed(group, http, cases, cut, interrupt)
        came_to = check(group, cases, wanted, got, outcomes)
        done += 1
        tiers += [o["tier"] for o in came_to]
        gaps.setdefault("move" if kind == MOVE else "kill", []).extend(o["gap_ms"] for o in came_to)
    assert done == 10
    told = ", ".join(f"{of} p50 {statistics.median(ms):.0f} max {max(ms):.0f} ms" for of, ms in sorted(gaps.items()))
    print(f"tensor parallel, {group.tier}: 10 interruptions, {len(tiers)} sessions {set(tiers)}, client gap: {told}")


@pytest.mark.apart
async def test_where_both_workers_lose_a_rank_sessions_wait_for_the_first_that_is_back(
    group: Group, http: aiohttp.ClientSession
) -> None:
    wanted = await group.wanted(http, CASES[:2])

    async def kill(sessions: Sequence[str]) -> None:
        for worker, rank in zip(await group.rig.sidecar.workers(http), (0, 1), strict=True):
            group.kill_rank(worker, rank)

    got, outcomes = await disturbed(group, http, CASES[:2], 20, kill)
    check(group, CASES[:2], wanted, got, outcomes)


async def test_a_rank_that_lags_one_step_is_found_and_what_it_lacks_is_not_restored(
    group: Group, http: aiohttp.ClientSession
) -> None:
    wanted = await group.wanted(http, CASES[:1])

    async def lag(sessions: Sequence[str]) -> None:
        group.let_lag(await group.worker_of(http, sessions[0]), 1)

    got, outcomes = await disturbed(group, http, CASES[:1], 20, lag)
    [outcome] = check(group, CASES[:1], wanted, got, outcomes)
    # The token that was journaled without all of its KV is computed again, and compared.
    assert outcome["lag"] >= 1, outcome
    assert outcome["tokens_recomputed"] == 1, outcome
    if group.tier == "held":
        assert (outcome["lag"], outcome["detail"]) == (1, "its ranks had not committed the same step"), outcome
        assert "event=ranks_behind" in group.rig.sidecar.log.read_text(errors="replace")
