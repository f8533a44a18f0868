"""What is read from a session's record, whatever became of its restore."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from midstream.proxy.coordinator import Outcome, SessionFacts
from midstream.session.ids import SessionId
from midstream.session.tracker import Tracker
from midstream.sidecar.choice import Candidate, Plan, Tier
from midstream.sidecar.cli_sessions import COLUMNS
from midstream.sidecar.mover.protocol import RestoreResult
from midstream.sidecar.session_record import Place, Record, outcome_of, output_max, told
from midstream.sidecar.workers import Epoch

SESSION = SessionId("a" * 32)


async def test_every_column_of_the_list_of_sessions_is_in_what_is_told_of_one() -> None:
    place = Place(SESSION, Epoch("w0", 1, None), 1)
    facts = SessionFacts(SESSION, "/v1/completions", {}, True)
    record = Record(facts, Tracker(SESSION), place, place, asyncio.Future(), time.monotonic())
    assert set(COLUMNS) - set(told(record)) == set()


async def refused() -> RestoreResult:
    return RestoreResult(False, reason="checksum")


async def broken() -> RestoreResult:
    raise RuntimeError("a fault of ours")


async def never() -> RestoreResult:
    await asyncio.sleep(3600)
    raise AssertionError


@pytest.mark.parametrize(
    ("restore", "detail"),
    [
        (refused, "checksum"),
        (broken, "the engine did not get its KV"),
        (never, "the engine did not get its KV"),
    ],
)
async def test_a_restore_that_came_to_nothing_is_told_and_never_raised(
    restore: Callable[[], Coroutine[Any, Any, RestoreResult]], detail: str
) -> None:
    place = Place(SESSION, Epoch("w0", 1, None), 2)
    facts = SessionFacts(SESSION, "/v1/completions", {}, True)
    record = Record(facts, Tracker(SESSION), place, place, asyncio.Future(), time.monotonic())
    record.plan = Plan(Candidate("w0", 1, None, 0, 1, None), Tier.HELD, (1,), (1, 2))
    record.restore = asyncio.create_task(restore())
    await asyncio.sleep(0.01)
    if restore is never:
        record.restore.cancel()
        await asyncio.gather(record.restore, return_exceptions=True)
    outcome, failed = outcome_of(record, None, 0.1)
    assert (outcome, failed.detail) == (Outcome.RECOMPUTED, detail)


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/v1/completions", {"max_tokens": 100, "max_completion_tokens": 5}, 100),
        ("/v1/completions", {"max_completion_tokens": 5}, None),
        ("/v1/chat/completions", {"max_tokens": 100, "max_completion_tokens": 5}, 5),
        ("/v1/chat/completions", {"max_tokens": 100, "max_output_tokens": 5}, 100),
        ("/v1/chat/completions", {"max_tokens": 100, "max_completion_tokens": None}, 100),
        ("/v1/responses", {"max_output_tokens": 100, "max_tokens": 5}, 100),
        ("/v1/messages", {"max_tokens": 100, "max_output_tokens": 5}, 100),
        ("/v1/messages", {"max_tokens": True}, None),
    ],
)
def test_an_answer_is_cut_short_by_no_field_that_its_engine_passes_over(
    path: str, body: dict[str, Any], wanted: int | None
) -> None:
    assert output_max(SessionFacts(SESSION, path, body, True)) == wanted
