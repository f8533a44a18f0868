"""A replay in pieces: what was put in one by one comes out one by one, and what follows is merged as ever."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from midstream.adapters.vllm.piecewise import kept_apart


class Output(SimpleNamespace):
    """As much of vLLM's output as its queue touches."""

    def add(self, other: Any, aggregate: bool) -> None:
        assert aggregate
        self.text += other.text


class Collector:
    """vLLM's queue: it holds one output, into which later ones are merged (v1/engine/output_processor.py)."""

    def __init__(self) -> None:
        self.aggregate = True
        self.output: Any = None
        self.ready = asyncio.Event()

    def put(self, output: Any) -> None:
        if self.output is None or isinstance(output, Exception):
            self.output = output
            self.ready.set()
        else:
            self.output.add(output, aggregate=self.aggregate)

    async def get(self) -> Any:
        while (output := self.output) is None:
            await self.ready.wait()
        return self._take(output)

    def get_nowait(self) -> Any:
        return None if self.output is None else self._take(self.output)

    def _take(self, output: Any) -> Any:
        self.output = None
        self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output


async def drained(queue: Collector) -> list[str]:
    said = []
    while (output := queue.get_nowait()) is not None:
        said.append(output.text)
    return said


async def test_pieces_of_a_replay_stay_apart_and_what_follows_is_merged() -> None:
    queue = Collector()
    with kept_apart(queue):
        for text in "abc":
            queue.put(Output(text=text))
    for text in "de":
        queue.put(Output(text=text))
    assert await drained(queue) == ["a", "b", "cde"]


async def test_after_its_replay_a_queue_is_what_it_was() -> None:
    queue = Collector()
    with kept_apart(queue):
        queue.put(Output(text="a"))
    assert (await queue.get()).text == "a"
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(Output(text="b"))
    assert (await waiting).text == "b"
    for text in "cd":
        queue.put(Output(text=text))
    assert await drained(queue) == ["cd"]


async def test_an_error_comes_before_what_is_left() -> None:
    queue = Collector()
    with kept_apart(queue):
        for text in "ab":
            queue.put(Output(text=text))
    queue.put(RuntimeError("dead"))
    with pytest.raises(RuntimeError, match="dead"):
        queue.get_nowait()
