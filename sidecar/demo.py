"""The demo: a streamed answer whose worker is killed, and a table that says what became of it.

Starts a sidecar with two real workers, streams one answer undisturbed and once more with a SIGKILL at a named token,
and compares. What is shown is measured here, from the client's side, but for the figures that the sidecar reports of
itself.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from ..loadtest.client import Answer, read_stream
from ..loadtest.exactness import lost_and_duplicated
from ..loadtest.harness import SidecarProcess, Victim, kill_worker
from ..session.errors import EngineError
from . import environments

CUT_AT_TOKEN = 48
PROMPT = "Write a long story about a dog named Max who travels the world."
REQUEST: dict[str, Any] = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 120,
    "temperature": 0.7,
    "seed": 11,
}


@dataclass(frozen=True, slots=True)
class Result:
    """What `midstream demo --json` prints."""

    engine: str
    tokens: int
    cut: int
    lag: int
    outcome: str
    tier: str
    identical: bool
    lost: int
    duplicated: int
    gap_ms: float
    kv_tokens_loaded: int
    tokens_recomputed: int
    killed: str

    @property
    def good(self) -> bool:
        """Whether the demo showed what it is meant to show."""
        return self.identical and not self.lost and not self.duplicated and self.outcome == "exact"


def run(*, engine: str, as_json: bool) -> int:
    """Show it; 0 only if the answer was identical, complete and exact."""
    progress = environments.Progress()
    try:
        command, environ = environments.demo_engine(engine, progress)
        # With --json the story goes to standard error, so that standard output is the one object.
        result = asyncio.run(_show(engine, command, environ, Console(stderr=as_json), progress))
    finally:
        progress.close()
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        Console().print(_table(result))
    return 0 if result.good else 1


async def _show(
    engine: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    console: Console,
    progress: environments.Progress,
) -> Result:
    sidecar = SidecarProcess(command, environ=environ)
    progress("starting two workers")
    try:
        async with aiohttp.ClientSession() as http:
            await sidecar.start(http)
            progress.close()
            console.print(f"[bold]{PROMPT}[/bold]  [dim]({engine}; the undisturbed answer is not shown)[/dim]\n")
            url = f"{sidecar.url}/v1/chat/completions"
            undisturbed = _require_whole(await read_stream(http, url, REQUEST))
            story = _Story(sidecar, http, console)
            answer = _require_whole(await read_stream(http, url, REQUEST, on_tokens=story.tell))
            console.print("\n")
            outcomes = (await sidecar.sessions(http))[-1]["outcomes"]
            return compare(engine, undisturbed, answer, outcomes, story.killed)
    finally:
        await asyncio.to_thread(sidecar.stop)


class _Story:
    """Prints the answer as it comes, and kills the worker that writes it at the named token."""

    def __init__(self, sidecar: SidecarProcess, http: aiohttp.ClientSession, console: Console) -> None:
        self._sidecar = sidecar
        self._http = http
        self._console = console
        self._shown = 0
        self.killed = ""

    async def tell(self, answer: Answer) -> None:
        style = "green" if self.killed else ""
        self._console.print(answer.text[self._shown :], end="", style=style, markup=False, highlight=False)
        self._shown = len(answer.text)
        if not self.killed and len(answer.token_ids) >= CUT_AT_TOKEN:
            worker = await self._sidecar.serving(self._http)
            count = len(kill_worker(worker["pid"], Victim.TREE))
            self.killed = f"{worker['name']}, {count} process{'es' if count > 1 else ''}"
            at = f"<SIGKILL at token {len(answer.token_ids)}: {self.killed}>"
            self._console.print(f" [bold red]{at}[/bold red] ", end="")


def compare(
    engine: str, undisturbed: Answer, answer: Answer, outcomes: Sequence[Mapping[str, Any]], killed: str
) -> Result:
    """What became of `answer`, beside the undisturbed one and what the sidecar reported."""
    lost, duplicated = lost_and_duplicated(undisturbed.token_ids, answer.token_ids)
    last = outcomes[-1] if outcomes else {}
    return Result(
        engine=engine,
        tokens=len(answer.token_ids),
        cut=int(last.get("cut", 0)),
        lag=int(last.get("lag", 0)),
        outcome=str(last.get("outcome", "undisturbed")),
        tier=str(last.get("tier", "")),
        identical=answer.same_as(undisturbed),
        lost=lost,
        duplicated=duplicated,
        gap_ms=round(answer.gap_s * 1000, 1),
        kv_tokens_loaded=int(last.get("kv_tokens_loaded", 0)),
        tokens_recomputed=int(last.get("tokens_recomputed", 0)),
        killed=killed,
    )


def _require_whole(answer: Answer) -> Answer:
    if not answer.whole:
        raise EngineError(f"the answer did not end well: {answer.error or '; '.join(answer.violations)}")
    return answer


def _table(result: Result) -> Table:
    table = Table(title="What became of the answer", show_header=False)
    rows = {
        "engine": result.engine,
        "killed": result.killed,
        "tokens": str(result.tokens),
        "cut at output token": str(result.cut),
        "lag (tokens regenerated)": str(result.lag),
        "outcome": f"{result.outcome} ({result.tier})",
        "longest gap seen by the client": f"{result.gap_ms:g} ms",
        "KV positions loaded": str(result.kv_tokens_loaded),
        "positions recomputed": str(result.tokens_recomputed),
        "lost / duplicated tokens": f"{result.lost} / {result.duplicated}",
        "identical to the undisturbed answer": "yes" if result.identical else "NO",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
