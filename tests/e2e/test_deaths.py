"""A worker that is killed: its sessions are taken over by its lifeline, before the kernel has taken it down."""

import re
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.client import Answer
from support.sidecars import Sidecar, outcome_of, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

BODY: dict[str, Any] = {"prompt": "The lifeline of a worker", "temperature": 0.8, "seed": 3, "max_tokens": 300}
TRIES = 3


async def interrupted(sidecar: Sidecar, http: aiohttp.ClientSession) -> tuple[Answer, list[str]]:
    """An answer whose worker was killed, and what the sidecar logged meanwhile."""
    killed: list[str] = []

    async def harm(answer: Answer) -> None:
        if not killed and len(answer.token_ids) >= 10:
            killed.append((await sidecar.process.serving(http))["name"])
            await sidecar.kill(http, killed[0])

    await sidecar.ready(http)
    before = len(log_of(sidecar))
    answer = await sidecar.stream(http, BODY, harm)
    await sidecar.ready(http)
    return answer, log_of(sidecar)[before:]


def log_of(sidecar: Sidecar) -> list[str]:
    return sidecar.process.log.read_text(errors="replace").splitlines()


def index_of(lines: list[str], pattern: str) -> int | None:
    return next((index for index, line in enumerate(lines) if re.search(pattern, line)), None)


async def test_sessions_are_taken_over_before_their_worker_is_gone(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    wanted = await sidecar.stream(http, BODY)
    seen = []
    for _ in range(TRIES):  # where a machine has other things to do both news may come at once
        answer, lines = await interrupted(sidecar, http)
        require_whole(answer)
        assert answer.same_as(wanted)
        assert outcome_of(answer) == ("exact", 1)
        took = index_of(lines, "event=interrupted .*reason=process_death")
        assert took is not None
        told = index_of(lines, r"event=death worker=worker-\d epoch=\d+ by=lifeline")
        gone = index_of(lines, "event=gone .*killed by SIGKILL")
        if told is not None and gone is not None and took < gone:
            return
        seen.append((told, took, gone))
    raise AssertionError(f"deaths were told by pidfds: lines of lifeline, takeover and pidfd {seen}")
