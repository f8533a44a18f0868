"""Streams on real workers that are killed: nobody who reads an answer can tell.

Each test runs on a sidecar of its own, and on one that all of them share.
"""

import asyncio
import os
import signal
from typing import Any

import aiohttp
import pytest

from midstream.loadtest.aim import kill_at
from midstream.loadtest.client import Answer
from midstream.loadtest.harness import Victim
from midstream.session.errors import PoolError
from midstream.session.held import HolderClient
from support.sidecars import BLOCK_TOKENS, Sidecar, outcome_of, require_whole, stop_process, until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

TOKENS = 120
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 7,
    "presence_penalty": 1.5,
    "frequency_penalty": 0.5,
    "top_p": 0.95,
    "max_tokens": TOKENS,
}
# Six prompts of their own, each with a secret.
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {**GREEDY, "prompt": "The secret is walrus, and"},
    "greedy chat": {**GREEDY, "messages": [{"role": "user", "content": "My password is 4711."}]},
    "sampled": {**SAMPLED, "prompt": "The key lies under the third stone from"},
    "sampled chat": {**SAMPLED, "messages": [{"role": "user", "content": "An emoji 🎉 for Ada"}]},
    "logprobs": {**SAMPLED, "prompt": "My name is Grace, and nobody else's", "logprobs": 2},
    "logprobs chat": {
        **GREEDY, "messages": [{"role": "user", "content": "Tell nobody: 299792458"}],
        "logprobs": True, "top_logprobs": 2,
    },
}  # fmt: skip


STOPPING = "Say END when you are done, and neither earlier nor later than that, whatever others may say"


async def ids_of(sidecar: Sidecar, http: aiohttp.ClientSession) -> set[str]:
    return {s["session"] for s in await sidecar.sessions(http)}


async def undisturbed(sidecar: Sidecar, http: aiohttp.ClientSession, body: dict[str, Any]) -> Answer:
    answer = await sidecar.stream(http, body)
    require_whole(answer)
    assert outcome_of(answer) == ("undisturbed", 0)
    return answer


def prompt_len(answer: Answer) -> int:
    assert answer.usage is not None
    return int(answer.usage["prompt_tokens"])


async def test_every_kind_of_answer_goes_on_at_the_exact_token(sidecar: Sidecar, http: aiohttp.ClientSession) -> None:
    await sidecar.ready(http)
    plain = await undisturbed(sidecar, http, {**GREEDY, "prompt": STOPPING})
    stop = next(plain.text[i : i + 6] for i in range(60, 100) if plain.text[i : i + 6].isascii())
    stopping = {**GREEDY, "prompt": STOPPING, "stop": [stop]}
    cut_off = await undisturbed(sidecar, http, stopping)
    assert cut_off.finish == "stop"
    assert stop not in cut_off.text

    known = await ids_of(sidecar, http)
    streams = [*BODIES.values(), stopping]
    # Two of each, one after the other, so that each worker has one of each.
    tasks = []
    for body in streams:
        for _ in range(2):
            tasks.append(asyncio.create_task(sidecar.stream(http, body)))
            await asyncio.sleep(0.01)
    unstreamed = asyncio.create_task(sidecar.whole(http, BODIES["sampled"]))
    unseeded = asyncio.create_task(
        sidecar.stream(http, {"prompt": "Whatever comes", "temperature": 1.0, "max_tokens": TOKENS})
    )
    # The worker dies when half of the stop string is out.
    shot = await asyncio.to_thread(
        kill_at,
        [await sidecar.target(http)],
        known,
        prompt_len=prompt_len(plain),
        outputs=len(cut_off.token_ids) - 3,
        victim=Victim.TREE,
    )
    answers = await asyncio.gather(*tasks)
    require_whole(*answers)
    assert prompt_len(plain) not in {prompt_len(answer) for answer in answers[:-2]}, "the kill is aimed by this length"
    assert shot.outputs < len(cut_off.token_ids)
    for one, other in zip(answers[::2], answers[1::2], strict=True):
        assert one.same_as(other)
    assert answers[-1].same_as(cut_off)
    assert len({answer.text for answer in answers}) == len(streams)
    for answer in (answers[2 * list(BODIES).index("logprobs")], answers[2 * list(BODIES).index("logprobs chat")]):
        assert len(answer.logprobs) == len(answer.token_ids) == TOKENS
    assert any(ord(character) > 0x1F000 for answer in answers for character in answer.text), "tiny says emoji"
    # Whatever was interrupted went on exactly; on a busy machine not each kind had one answer on each worker.
    outcomes = [outcome_of(answer) for answer in answers]
    assert set(outcomes) == {("exact", 1), ("undisturbed", 0)}
    assert outcomes.count(("exact", 1)) >= len(streams) // 2

    require_whole(await unseeded)
    assert len((await unseeded).token_ids) == TOKENS
    assert outcome_of(await unseeded)[0] in ("exact", "undisturbed")
    in_one_piece = await unstreamed
    require_whole(in_one_piece)
    sampled = answers[2 * list(BODIES).index("sampled")]
    assert (in_one_piece.token_ids, in_one_piece.text) == (sampled.token_ids, sampled.text)
    interrupted = [s for s in await sidecar.sessions(http) if s["session"] not in known and s["outcomes"]]
    assert {s["outcomes"][0]["outcome"] for s in interrupted} == {"exact"}
    assert len(interrupted) >= len(streams) + 1, "of what ran alone, one had the killed worker"


async def test_a_worker_that_dies_at_the_last_token_leaves_one_ending(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    body = {**SAMPLED, "max_tokens": 20, "prompt": "One ending only"}
    wanted = await undisturbed(sidecar, http, body)
    targets = [await sidecar.target(http, name) for name in ("worker-0", "worker-1")]
    killed = {target.name: target.pid for target in targets}
    for outputs in (20, 19):
        shooting = asyncio.to_thread(
            kill_at,
            targets,
            await ids_of(sidecar, http),
            prompt_len=prompt_len(wanted),
            outputs=outputs,
            victim=Victim.ROOT,
        )
        answer, shot = await asyncio.gather(sidecar.stream(http, body), shooting)
        require_whole(answer)
        assert shot.outputs >= outputs
        assert answer.same_as(wanted)
        assert (answer.finish, len(answer.token_ids)) == ("length", 20)
        told = (await sidecar.sessions(http))[-1]
        assert outcome_of(answer)[0] in ("exact", "undisturbed"), str(told["outcomes"])
        # The second time the other worker dies, and nobody is left for a while.
        targets = [target for target in targets if target.name != shot.worker]

        async def is_noticed(
            http: aiohttp.ClientSession, name: str = shot.worker, pid: int = killed[shot.worker]
        ) -> bool:
            worker = await sidecar.worker(http, name)
            return bool(worker["state"] != "ready" or worker["pid"] != pid)

        await until(is_noticed, http)


async def test_two_deaths_in_one_session_and_nobody_left_for_a_while(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    # Long, for on a busy machine the second kill takes its time.
    body = {**SAMPLED, "max_tokens": 600, "prompt": "A long way to go, twice"}
    wanted = await undisturbed(sidecar, http, body)
    known = await ids_of(sidecar, http)
    first, second = [await sidecar.target(http, name) for name in ("worker-0", "worker-1")]
    # The first token, then the edge of a block on the other worker.
    edge = next(n for n in range(40, 80) if (prompt_len(wanted) + n) % BLOCK_TOKENS == 0)
    shots = [
        asyncio.to_thread(kill_at, [target], known, prompt_len=prompt_len(wanted), outputs=outputs, victim=Victim.TREE)
        for target, outputs in ((first, 1), (second, edge))
    ]
    answer, *told = await asyncio.gather(sidecar.stream(http, body), *shots)
    require_whole(answer)
    assert [shot.worker for shot in told] == ["worker-0", "worker-1"]
    assert told[0].session == told[1].session
    assert answer.same_as(wanted)
    assert outcome_of(answer) == ("exact", 2)
    assert answer.comments > 1, "a stream that waits gets comments"


async def test_a_hung_worker_is_left_killed_and_comes_back(sidecar: Sidecar, http: aiohttp.ClientSession) -> None:
    await sidecar.ready(http)
    body = {**GREEDY, "max_tokens": 600, "prompt": "Silence is no answer"}
    wanted = await undisturbed(sidecar, http, body)
    hung: list[dict[str, Any]] = []

    async def hang(answer: Answer) -> None:
        if not hung and len(answer.token_ids) >= 30:
            hung.append(await sidecar.process.serving(http))
            stop_process(hung[0]["pid"])

    answer = await sidecar.stream(http, body, hang)
    require_whole(answer)
    assert answer.same_as(wanted)
    assert outcome_of(answer) == ("exact", 1), (await sidecar.process.sessions(http))[-1]["outcomes"]

    async def is_back(http: aiohttp.ClientSession) -> bool:
        worker = await sidecar.worker(http, hung[0]["name"])
        return bool(worker["epoch"] > hung[0]["epoch"] and worker["state"] == "ready")

    await until(is_back, http, limit_s=60)


async def test_a_new_holder_and_a_new_mover_do_as_well_as_the_old_ones(
    sidecar: Sidecar, http: aiohttp.ClientSession
) -> None:
    await sidecar.ready(http)
    body = {**SAMPLED, "max_tokens": 1500, "prompt": "While I speak, others change"}
    mover = (await sidecar.status(http))["mover"]
    client = HolderClient(sidecar.process.state_dir / "holder.sock")
    pools = {pool.name for pool in client.list()}
    killed: list[str] = []

    async def are_back(http: aiohttp.ClientSession) -> bool:
        status = await sidecar.status(http)
        if status["mover"]["restarts"] == mover["restarts"] or not sidecar.holders():
            return False
        try:
            return pools <= {pool.name for pool in client.list()}
        except PoolError:
            return False  # it is there, but does not listen yet

    async def harm(answer: Answer) -> None:
        if not killed and len(answer.token_ids) >= 10:
            killed.append((await sidecar.process.serving(http))["name"])
            assert sidecar.process.kill_holder()
            os.kill(mover["pid"], signal.SIGKILL)

    async def then_kill() -> None:
        while not killed:  # noqa: ASYNC110 - a plain list that grows
            await asyncio.sleep(0.01)
        await until(are_back, http)
        await sidecar.kill(http, killed[0])

    one = asyncio.create_task(sidecar.stream(http, body, harm))
    other, _ = await asyncio.gather(sidecar.stream(http, body), then_kill())
    answer = await one
    require_whole(answer, other)
    assert answer.same_as(other)
    assert {outcome_of(answer), outcome_of(other)} == {("exact", 1), ("undisturbed", 0)}
