"""Front end: a replay that comes token by token, where its text would come to other fields in one piece.

With stop strings vLLM holds back the newest characters, so that a token's text comes with a later token's id. Parsers
that go by ids (the end of thoughts) then cut the text elsewhere when all of it comes at once, and some parsers do not
take that well. Elsewhere one piece is far cheaper, so it stays the rule. Invariant: what the
replay put in is handed out piece by piece; once it is over, what follows is merged as ever, so nothing grows unbounded.
"""

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def needs_pieces(sampling_params: Any) -> bool:
    """Whether a streamed request's text may come later than its tokens, or goes through a parser that minds the pieces.

    A forced tool call (a grammar, that is) was seen to end in an internal error of its parser when it came at once, and
    thoughts that a budget ended to begin the answer elsewhere.
    """
    from vllm.sampling_params import RequestOutputKind

    minds = (
        bool(sampling_params.stop)
        or getattr(sampling_params, "structured_outputs", None) is not None
        or getattr(sampling_params, "thinking_token_budget", None) is not None
    )
    return minds and bool(sampling_params.output_kind == RequestOutputKind.DELTA)


@contextmanager
def kept_apart(queue: Any) -> Iterator[None]:
    """While this lasts, what is put into a request's queue stays in pieces of its own."""
    kind: Any = type(queue)
    queue.__class__ = _apart(kind)
    queue.later = deque()
    queue.is_replayed = True
    try:
        yield
    finally:
        queue.is_replayed = False


@functools.cache
def _apart(kind: Any) -> Any:
    """vLLM's queue, which holds one output, with others behind it."""

    class Apart(kind):
        """A queue whose outputs are merged only behind those of a replay."""

        later: "deque[Any]"
        is_replayed: bool

        def put(self, output: Any) -> None:
            """Take an output; errors come first, as ever."""
            if self.output is None or isinstance(output, Exception):
                super().put(output)
            elif self.is_replayed:
                self.later.append(output)
            elif self.later:
                self.later[-1].add(output, aggregate=self.aggregate)
            else:
                super().put(output)

        async def get(self) -> Any:
            """The next output; waits for one."""
            output = await super().get()
            self._advance()
            return output

        def get_nowait(self) -> Any:
            """The next output, or None."""
            output = super().get_nowait()
            self._advance()
            return output

        def _advance(self) -> None:
            if self.output is None and self.later:
                super().put(self.later.popleft())

    return Apart
