"""A simulated engine: journals and KV as the sidecar reads them, and the stream that its front end writes.

Owns one epoch of one worker: its arena (in memory, with the records of real ones) and its pool. KV is known by its
outputs and by what was prefilled again; an engine that is given KV of another prompt, or of other outputs, stops the
simulation. Outputs are re-entered, replayed and gone on from as docs/design.md says. It survives its sidecar's stop,
not its sidecar's death.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import msgspec
from multidict import CIMultiDict

from midstream.session.ids import SessionId
from midstream.session.marker import FIELD, NAME, KvSource, Marker
from midstream.session.records import LoadState, Slot, SlotState, complete_kv_len

from .http import EOF, Ask, Head
from .loop import WORLD, Process
from .network import CLOSED, End, Network
from .truth import Question, text, token

LOAD_TIMEOUT_S = 1.0
_FORGOTTEN_S = 5.0


class SilentlyWrong(AssertionError):
    """An engine was given what is not its session's."""


@dataclass(frozen=True, slots=True)
class Kv:
    """KV of the first positions of one prompt and these outputs; of the newest output there is none yet.

    `again` says of each output but the newest whether its KV was prefilled and not decoded.
    """

    question: int
    prompt_len: int
    outputs: tuple[int, ...]
    again: tuple[bool, ...]

    @property
    def kv_len(self) -> int:
        return self.prompt_len + len(self.outputs) - 1


class Phase(Enum):
    LOADING = auto()
    PREFILL = auto()
    DECODING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False)
class Run:
    """One request in the engine, and its record in the arena."""

    question: Question
    marker: Marker
    end: End
    index: int
    is_streamed: bool
    outputs: list[int]
    again: list[bool]
    phase: Phase = Phase.PREFILL
    resumed: int = 0
    replayed: int = 0
    state: SlotState = SlotState.LIVE
    load: LoadState = LoadState.NONE
    loaded: int = 0
    recomputed: int = 0
    finish: str = ""
    deadline_s: float = 0.0
    brought: "Kv | None" = None
    sequence: int = 1
    is_left: bool = False

    def slot(self) -> Slot:
        """Its record as readers see it."""
        return Slot(
            self.index, self.sequence, self.marker.session, self.marker.generation, self.state,
            self.question.prompt_len, _hash(self.question), self.resumed, self.load, self.loaded, self.recomputed,
            self.finish,
        )  # fmt: skip

    def kv(self) -> Kv | None:
        """What KV there is of it."""
        count = complete_kv_len(self.slot(), len(self.outputs)) - self.question.prompt_len + 1
        if count < 1 or self.state is not SlotState.LIVE:
            return None
        return Kv(
            self.question.number, self.question.prompt_len, tuple(self.outputs[:count]), tuple(self.again[: count - 1])
        )


class SimArena:
    """An epoch's arena as `ArenaReader` reads it."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self._facts = facts
        self.runs: dict[tuple[SessionId, int], Run] = {}
        self.is_published = False

    def facts(self) -> dict[str, Any] | None:
        return dict(self._facts) if self.is_published else None

    def find(self, session: SessionId, generation: int) -> Slot | None:
        run = self.runs.get((session, generation))
        return None if run is None else run.slot()

    def run(self, session: SessionId, generation: int) -> Run | None:
        return self.runs.get((session, generation))

    def journal(self, slot: Slot) -> list[int]:
        run = self.runs.get((slot.session, slot.generation))
        return [] if run is None else list(run.outputs)

    def kv_len(self, slot: Slot) -> int:
        run = self.runs.get((slot.session, slot.generation))
        return 0 if run is None else complete_kv_len(slot, len(run.outputs))

    def commits(self) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        self.runs.clear()


class SimEngine:
    """One epoch."""

    def __init__(
        self,
        network: Network,
        process: Process,
        host: str,
        address: str,
        questions: Mapping[str, Question],
        arena: SimArena,
        chance: random.Random,
        on_defect: Callable[[BaseException], None],
        *,
        step_s: float,
        chunk: int,
        runs_max: int,
    ) -> None:
        self.arena = arena
        self.runs: list[Run] = []
        self.is_hung = False
        self.tokens = 0
        self._network = network
        self._process = process
        self._questions = questions
        self._chance = chance
        self._on_defect = on_defect
        self._step_s = step_s
        self._chunk = chunk
        self._runs_max = runs_max
        # Some front ends replay what is re-entered at once, some with the first token that is computed.
        self._replays_early = chance.random() < 0.5
        self._is_ticking = False
        self._index = 0
        network.listen(address, process, host, self._accept)

    @property
    def is_alive(self) -> bool:
        """Whether its process is."""
        return self._process.is_alive

    def _accept(self, end: End) -> None:
        end.heard = lambda message: self._heard(end, message)

    def _heard(self, end: End, message: Any) -> None:
        if isinstance(message, Ask):
            try:
                self._begin(end, message)
            except SilentlyWrong as error:
                self._on_defect(error)
        elif message is CLOSED:
            # An engine that hangs does not even hear that.
            for run in self.runs:
                run.is_left = run.is_left or run.end is end

    def _begin(self, end: End, ask: Ask) -> None:
        body = msgspec.json.decode(ask.body)
        question = self._questions[body["prompt"]]
        marker = Marker.from_json(body[FIELD][NAME])
        resume = marker.resume
        outputs = list(resume.outputs) if resume is not None else []
        for place, value in enumerate(outputs):
            if value // 10 != place:
                raise SilentlyWrong(f"session {marker.session}: output {place} is said to be {value}")
        streamed = body.get("stream") is True
        self._index += 1
        run = Run(question, marker, end, self._index, streamed, outputs, [False] * len(outputs), resumed=len(outputs))
        if streamed:
            end.send(Head(200, CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8"})))
        if resume is not None and resume.finish:
            # The front end alone: nothing is computed, and the core never hears of it.
            self._say(run, 0, resume.finish)
            return
        if resume is not None and outputs and resume.kv is not KvSource.NONE and resume.prompt_hash != _hash(question):
            raise SilentlyWrong(f"session {marker.session}: KV is offered for another prompt")
        self.runs.append(run)
        self.arena.runs[marker.session, marker.generation] = run
        if outputs and self._replays_early and streamed:
            self._say_tokens(run, 0, len(outputs), "")
            run.replayed = len(outputs)
        if outputs and resume is not None and resume.kv is not KvSource.NONE:
            run.phase, run.load = Phase.LOADING, LoadState.WAITING
            run.deadline_s = self._network.loop.now_s + LOAD_TIMEOUT_S
        self._tick_later()

    def answer(self, run: Run, kv: Kv | None) -> None:
        """The mover's word on KV that a run waits for; None: it failed."""
        if run.phase is not Phase.LOADING or run.load is not LoadState.WAITING:
            return
        if kv is None:
            run.deadline_s = 0.0
            return
        if kv.question != run.question.number or list(kv.outputs) != run.outputs:
            self._on_defect(SilentlyWrong(f"session {run.marker.session}: KV of question {kv.question} {kv.outputs}"))
            return
        run.brought = kv

    def _tick_later(self) -> None:
        if not self._is_ticking and self.runs:
            self._is_ticking = True
            self._network.loop.call_later(self._step_s, self._tick, context=WORLD)

    def _tick(self) -> None:
        self._is_ticking = False
        if not self._process.is_alive:
            return
        if not self.is_hung and not self._process.is_stopped:
            decoding = 0
            for run in [run for run in self.runs if run.is_left]:
                self._over(run, "abort")
            for run in list(self.runs):
                if decoding >= self._runs_max:
                    break
                if run.phase is not Phase.LOADING:
                    decoding += 1
                self._step(run)
        self._tick_later()

    def _step(self, run: Run) -> None:
        run.sequence += 1
        if run.phase is Phase.LOADING:
            if run.brought is not None:
                run.load, run.loaded = LoadState.DONE, run.brought.kv_len
                run.again[: len(run.outputs) - 1] = run.brought.again
                run.phase = Phase.DECODING
            elif self._network.loop.now_s >= run.deadline_s:
                run.load, run.phase = LoadState.FAILED, Phase.PREFILL
        elif run.phase is Phase.PREFILL:
            if run.outputs:
                run.load = LoadState.FAILED
                run.recomputed = run.question.prompt_len + len(run.outputs)
                run.again = [True] * (len(run.outputs) - 1) + [False]
            run.phase = Phase.DECODING
        else:
            self._decode(run)

    def _decode(self, run: Run) -> None:
        begun = len(run.outputs)
        again = sum(run.again)
        for _ in range(self._chunk):
            if len(run.outputs) < run.question.length:
                run.outputs.append(token(run.question, len(run.outputs), again))
                run.again.append(False)
                self.tokens += 1
        finish = run.question.finish if len(run.outputs) >= run.question.length else ""
        first = begun if run.replayed == begun or not run.is_streamed else run.replayed
        if finish:
            self._over(run, finish)
        self._say(run, first, finish)

    def _over(self, run: Run, finish: str) -> None:
        run.phase, run.state, run.finish = Phase.OVER, SlotState.FINISHED, finish
        run.sequence += 1
        self.runs.remove(run)
        # Its record is there for a while, until another session takes its place.
        self._network.loop.call_later(_FORGOTTEN_S, self._forget, run, context=WORLD)

    def _forget(self, run: Run) -> None:
        key = run.marker.session, run.marker.generation
        if self.arena.runs.get(key) is run:
            del self.arena.runs[key]

    def _say(self, run: Run, first: int, finish: str) -> None:
        if run.is_streamed:
            self._say_tokens(run, first, len(run.outputs), finish)
            run.replayed = len(run.outputs)
            if finish:
                run.end.send(b"data: [DONE]\n\n")
                run.end.send(EOF)
        elif finish:
            run.end.send(Head(200, CIMultiDict({"Content-Type": "application/json"})))
            run.end.send(_dump(_whole(run, finish)))
            run.end.send(EOF)

    def _say_tokens(self, run: Run, first: int, end: int, finish: str) -> None:
        choice = {
            "index": 0,
            "text": "".join(map(text, run.outputs[first:end])),
            "finish_reason": finish or None,
            "prompt_token_ids": list(range(run.question.prompt_len)) if first == 0 else None,
            "token_ids": run.outputs[first:end],
        }
        run.end.send(b"data: " + _dump({"id": "cmpl", "object": "text_completion", "choices": [choice]}) + b"\n\n")


def _whole(run: Run, finish: str) -> dict[str, Any]:
    answer = "".join(map(text, run.outputs))
    choice = {"index": 0, "text": answer, "finish_reason": finish, "token_ids": run.outputs}
    return {"id": "cmpl", "object": "text_completion", "choices": [choice]}


def _hash(question: Question) -> str:
    return f"{question.number + 1:032x}"


_dump = msgspec.json.encode
