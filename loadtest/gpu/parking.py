"""What parking costs and survives on a GPU: each step a process of its own with a deadline, and a vLLM.

Owns the order of the steps, their deadlines and their bars. A step that hangs is killed with all that it started, and
the next one runs. The steps are `park_steps.py`, what they park is `park_target.py`.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ...session.errors import MidstreamError
from . import park_steps
from .clock import Clock
from .engines import Engine
from .models import SERVED_AS, large_options, serve
from .results import Results

PART = "park"
KV_BYTES = 8 << 30
PROMPT = list(range(200, 264))
ANSWER_TOKENS = 48
# A cold start of vLLM on a machine that has not seen it, and what is measured of it then.
VLLM_START_S = 300.0


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the words that `park_steps.py` is called with, and how long it may take."""

    words: tuple[str, ...]
    within_s: float


# While an engine loads: what takes no measure of speed, and leaves the card room.
BESIDE = (
    Step(("about",), 30),
    Step(("train", "150"), 90),
    Step(("pool", "holder"), 50),
    Step(("pool", "owner"), 50),
    Step(("pool", "nobody"), 50),
    Step(("busy",), 50),
    Step(("killed", "checkpoint", "helper"), 75),
    Step(("killed", "checkpoint", "both"), 75),
    Step(("killed", "restore", "helper"), 75),
)
# With the card to themselves.
ALONE = (
    Step(("image", "1", "as it comes"), 40),
    Step(("image", "8", "as it comes"), 50),
    Step(("image", "8", "ready"), 60),
    Step(("image", "24", "ready"), 90),
    Step(("full",), 60),
)
WORDS = ("all", "vllm", *dict.fromkeys(step.words[0] for step in (*BESIDE, *ALONE)))
# The beginnings of names, the least or the most that the figure may be.
BARS: dict[str, tuple[float, bool]] = {
    "calls that parking needs": (0, False),
    "losses that differ": (0, False),
    "as it was": (1, True),
    "held pool, owner's bytes": (1, True),
    "a full GPU": (1, True),
    "a long kernel": (1, True),
    "helper killed": (1, True),
    "both killed": (1, True),
    "tokens that differ": (0, False),
}


async def measure(model: Path | None, folder: Path, results: Results, clock: Clock, *, words: str = "all") -> None:
    """All steps that fit into the time, or those of `words`. `model`: None where no engine can be started."""
    chosen = WORDS if words == "all" else tuple(words.split(","))
    engine = None
    if "vllm" in chosen and model is not None:
        options = [*large_options(KV_BYTES, len_max=8192), "--enable-sleep-mode"]
        engine = Engine(PART, serve(model, *options), folder)
        engine.start()
    try:
        for step in BESIDE:
            await _if_chosen(step, chosen, folder, results, clock)
        if engine is not None:
            try:
                await _engine(engine, results, clock)
            except (MidstreamError, aiohttp.ClientError, TimeoutError, OSError) as error:
                print(engine.last_lines(), flush=True)
                results.missing(PART, "vllm", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
    finally:
        if engine is not None:
            await asyncio.to_thread(engine.stop)
    for step in ALONE:
        await _if_chosen(step, chosen, folder, results, clock)


async def _if_chosen(step: Step, chosen: Sequence[str], folder: Path, results: Results, clock: Clock) -> None:
    name = " ".join(step.words)
    if step.words[0] not in chosen:
        return
    if clock.left_s() < step.within_s:
        results.missing(PART, name, f"only {clock.left_s():.0f} s of the time were left")
        return
    await asyncio.to_thread(_run, folder / name.replace(" ", "-"), step, name, results)


def _run(folder: Path, step: Step, name: str, results: Results) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ms-park-") as place, (folder / "log").open("w") as log:
        argv = [sys.executable, "-m", park_steps.__name__, *step.words, "--folder", place]
        # A session of its own, so that all that it has started can be ended with it.
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
        why = ""
        try:
            out, _ = process.communicate(timeout=step.within_s)
        except subprocess.TimeoutExpired:
            why = f"it took longer than {step.within_s:.0f} s"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
    for line in out.splitlines():
        if line.startswith("figure "):
            add(results, json.loads(line.removeprefix("figure ")))
    if process.returncode != 0:
        last = (folder / "log").read_text(errors="replace").strip().splitlines()
        results.missing(PART, name, why or (last[-1] if last else f"exit status {process.returncode}"))


def add(results: Results, told: dict[str, Any]) -> None:
    """A step's figure, with its bar."""
    name, value, unit = str(told.pop("name")), told.pop("value"), str(told.pop("unit", ""))
    bar, at_least = next((bar for start, bar in BARS.items() if name.startswith(start)), (None, False))
    results.add(PART, name, value, unit, bar=bar, at_least=at_least, **told)


async def _engine(engine: Engine, results: Results, clock: Clock) -> None:
    """An 8B-shaped model: parked as it is, and asleep, each against its cold start."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as http:
        cold_s = await engine.wait_ready(http, timeout_s=min(VLLM_START_S, clock.left_s()))
        await engine.warm_up(http)
        known = await _answer(engine, http)
        results.add(PART, "vllm: cold start", cold_s, "s")
        with tempfile.TemporaryDirectory(prefix="ms-park-") as place:
            await _there_and_back(engine, http, Path(place), results, known, asleep=False)
            await _there_and_back(engine, http, Path(place), results, known, asleep=True)


async def _there_and_back(
    engine: Engine, http: aiohttp.ClientSession, folder: Path, results: Results, known: Sequence[Any], *, asleep: bool
) -> None:
    how = "asleep" if asleep else "as it is"
    free = await asyncio.to_thread(park_steps.free_bytes)
    slept_s = await _post(engine, http, "/sleep?level=1") if asleep else 0.0
    pid = engine.core().pid
    began_s = time.monotonic()
    there = park_steps.required(await asyncio.to_thread(park_steps.park, folder, pid))
    out_s = time.monotonic() - began_s
    parked = await asyncio.to_thread(park_steps.free_bytes)
    began_s = time.monotonic()
    back = park_steps.required(await asyncio.to_thread(park_steps.unpark, folder, pid))
    in_s = time.monotonic() - began_s
    woke_s = await _post(engine, http, "/wake_up") if asleep else 0.0
    answered_s = time.monotonic()
    got = await _answer(engine, http)
    first_s = time.monotonic() - answered_s
    results.add(
        PART, f"vllm, {how}: park", slept_s + out_s, "s", sleep_s=round(slept_s, 3), command_s=round(out_s, 3),
        seconds=there, freed_gib=round((parked - free) / (1 << 30), 2),
    )  # fmt: skip
    results.add(
        PART, f"vllm, {how}: unpark until it can answer", in_s + woke_s, "s", wake_s=round(woke_s, 3),
        command_s=round(in_s, 3), answer_s=round(first_s, 3), seconds=back,
    )  # fmt: skip
    differ = sum(a != b for a, b in zip(known, got, strict=False)) + abs(len(known) - len(got))
    add(results, {"name": f"tokens that differ, vllm {how}", "value": differ, "unit": "tokens"})


async def _answer(engine: Engine, http: aiohttp.ClientSession) -> list[Any]:
    body = {
        "model": SERVED_AS, "prompt": PROMPT, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True,
        "logprobs": 1, "return_token_ids": True,
    }  # fmt: skip
    async with http.post(f"{engine.url}/v1/completions", json=body) as answer:
        told = await answer.json()
        if answer.status != 200:
            raise MidstreamError(f"the engine answers {answer.status}: {str(told)[:300]}")
    [choice] = told["choices"]
    return list(choice.get("token_ids") or choice["logprobs"]["tokens"])


async def _post(engine: Engine, http: aiohttp.ClientSession, path: str) -> float:
    began_s = time.monotonic()
    async with http.post(engine.url + path) as answer:
        if answer.status != 200:
            raise MidstreamError(f"{path} is answered {answer.status}: {(await answer.text())[:300]}")
    return time.monotonic() - began_s
