"""How a branch of a session is made: the request with which it goes on, and where its KV is. Pure.

KV is append-only, so every earlier position of a session is a point to go back to: a branch re-enters the first outputs
of its parent and takes the KV before them, then decodes on by a request that may differ in anything but its prompt.
"""

from collections.abc import Mapping
from typing import Any

from ..proxy.coordinator import SessionFacts
from ..proxy.dialects.by_path import GENERATE_PATH
from ..proxy.eligible import why_not_resumable
from ..session.errors import Refused
from ..session.ids import SessionId
from .session_record import output_limit, wants_logprobs

# Whatever the prompt is made of: another one has other KV. And what a branch decides by itself.
FIXED = frozenset(
    {
        "model", "prompt", "messages", "input", "system", "instructions", "tools", "tool_choice", "documents",
        "chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
        "add_special_tokens", "truncate_prompt_tokens", "reasoning_effort", "cache_salt", "stream", "n",
    }
)  # fmt: skip


def branch_of(parent: SessionFacts, session: SessionId, changes: Mapping[str, Any]) -> SessionFacts:
    """The facts of a branch. Raises Refused, naming the field that is in the way."""
    if parent.path == GENERATE_PATH:
        raise Refused("bad_request", f"session {parent.session} came to {parent.path}, whose sessions have no branches")
    wrong = sorted(FIXED & set(changes))
    if wrong:
        raise Refused("bad_request", f"{', '.join(wrong)} cannot be set for a branch: it has its parent's prompt")
    body = {**parent.body, **changes, "stream": True}
    body = {name: value for name, value in body.items() if value is not None}
    if wants_logprobs(body):
        raise Refused(
            "bad_request", "logprobs of the tokens before the branch are not kept: add --set logprobs=null to go on"
        )
    obstacle = why_not_resumable(body, parent.path)
    if obstacle is not None:
        raise Refused("not_exact", f"a request with {obstacle.value!r} cannot go on from KV: leave that out")
    # The parent's own seed, or the one that was drawn for it, unless the branch is to have another.
    seed = None if "seed" in changes else parent.seed
    return SessionFacts(session, parent.path, body, stream=True, policy=parent.policy, parent=parent.session, seed=seed)


def require_beginning(branch: SessionFacts, at: int, count: int, finish: str) -> None:
    """Refused unless a branch may go on after `at` of the `count` outputs that its parent ended with `finish`."""
    if not 1 <= at <= count:
        there = f"give --at 1 to {count}" if count else "ask again when it has some"
        raise Refused("bad_request", f"session {branch.parent} has {count} outputs, so none at {at}; {there}")
    if at == count and finish == "stop":
        there = f"give --at 1 to {count - 1}" if count > 1 else "nothing of it can be gone back to"
        raise Refused("bad_request", f"session {branch.parent} has come to its end with output {count}; {there}")
    limit = output_limit(branch)
    if limit is not None and limit[1] <= at:
        raise Refused(
            "bad_request",
            f"{limit[0]} of {limit[1]} leaves nothing to write after {at} outputs; add --set {limit[0]}=N, N larger",
        )
    if limit is None and at == count and finish == "length":
        raise Refused(
            "bad_request",
            f"session {branch.parent} was cut off at {count} outputs by a limit of the engine's; "
            "add --set max_tokens=N with a larger N, or give a smaller --at",
        )
