"""What a scripted engine says in the APIs whose streams carry no token ids: Responses and Messages, in vLLM's own form.

Owns the order of events and their members (vLLM 0.32: openai/responses/streaming_events.py, anthropic/serving.py). An
answer is a list of items, each with the pieces of its text, one a token; two engines with the same answer say the same
under other ids, and one that replays says the first tokens in one piece for each item.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Item:
    """One item (Responses) or block (Messages): "reasoning", "text" or "tool", and its pieces."""

    kind: str
    pieces: tuple[str, ...]
    name: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class EventAnswer:
    """A whole answer."""

    items: tuple[Item, ...]
    finish: str = "stop"
    prompt_tokens: int = 33

    @property
    def count(self) -> int:
        """How many tokens it has."""
        return sum(len(item.pieces) for item in self.items)

    @classmethod
    def words(cls, count: int, finish: str = "stop") -> "EventAnswer":
        """One text of so many words."""
        return cls((Item("text", tuple(f" w{i}" for i in range(count))),), finish)


RICH = EventAnswer(
    (
        Item("reasoning", ("Let", " me", " think\n", "about", " 🦀")),
        Item("text", ("It ", "is\r", "\n\"12\"", " é", "")),
        Item("tool", ("{\"ci", "ty\": \"Pa", "ris\", ", "\"unit\": \"c\"}"), "get_weather"),
        Item("tool", ("{\"city\"", ": \"Rome\"}"), "get_weather"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """One event and after how many tokens it is sent."""

    raw: bytes
    after: int
    body: dict[str, Any] = field(default_factory=dict)


def _deltas(item: Item, start: int, known: int) -> Iterator[tuple[int, str]]:
    """(tokens told after it, text): what of it is among the first `known` tokens of the answer comes in one piece."""
    together = max(0, min(len(item.pieces), known - start))
    if together:
        yield start + together, "".join(item.pieces[:together])
    for index in range(together, len(item.pieces)):
        yield start + index + 1, item.pieces[index]


def responses_events(
    answer: EventAnswer, engine: str, *, replayed: int = 0, seed_time: int = 1700000000, abort_after: int | None = None
) -> list[Told]:
    """The events of `/v1/responses`."""
    told: list[Told] = []

    def tell(after: int, body: dict[str, Any]) -> None:
        if "sequence_number" in body:
            body["sequence_number"] = len(told)
        raw = f"event: {body['type']}\ndata: {_dump(body)}\n\n".encode()
        told.append(Told(raw, after, body))

    response: dict[str, Any] = {
        "id": f"resp_{engine}", "created_at": seed_time, "incomplete_details": None, "instructions": None,
        "metadata": None, "model": "tiny", "object": "response", "output": [], "parallel_tool_calls": True,
        "temperature": 0.0, "tool_choice": "auto", "tools": [], "top_p": 1.0, "status": "in_progress", "usage": None,
        "kv_transfer_params": None,
    }  # fmt: skip
    for kind in ("created", "in_progress"):
        tell(0, {"response": response, "sequence_number": 0, "type": f"response.{kind}"})
    position, output = 0, []
    for index, item in enumerate(answer.items):
        if abort_after is not None and position >= abort_after:
            break
        where = {"output_index": index, "sequence_number": 0}
        for after, body, done in _response_item(item, index, engine, position, replayed, abort_after):
            tell(after, body | where)
            if done is not None:
                output.append(done)
        position += len(item.pieces)
    count = answer.count if abort_after is None else abort_after
    usage = {
        "input_tokens": answer.prompt_tokens, "output_tokens": count, "total_tokens": answer.prompt_tokens + count,
    }  # fmt: skip
    status = "incomplete" if answer.finish == "length" else "completed"
    final = response | {"output": output, "status": status, "usage": usage}
    tell(count, {"response": final, "sequence_number": 0, "type": "response.completed"})
    return told


def _response_item(
    item: Item, index: int, engine: str, position: int, replayed: int, abort_after: int | None
) -> Iterator[tuple[int, dict[str, Any], dict[str, Any] | None]]:
    prefix = {"reasoning": "rs", "text": "msg", "tool": "fc"}[item.kind]
    item_id, call_id = f"{prefix}_{engine}{index}", f"call_{engine}{index}"
    first = position + min(1, len(item.pieces))
    if replayed > position:
        first = min(replayed, position + len(item.pieces))
    part = {"item_id": item_id, "content_index": 0}
    begun: dict[str, Any]
    match item.kind:
        case "reasoning":
            begun = {"id": item_id, "summary": [], "type": "reasoning", "content": None, "status": "in_progress"}
            kind, empty = "reasoning_text", {"text": "", "type": "reasoning_text"}
        case "text":
            begun = {"id": item_id, "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
            kind, empty = "output_text", {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        case _:
            begun = {"arguments": "", "call_id": call_id, "name": item.name, "type": "function_call", "id": item_id}
            begun |= {"status": "in_progress"}
            kind, empty, part = "function_call_arguments", {}, {"item_id": item_id}
    yield first, {"item": begun, "type": "response.output_item.added"}, None
    if empty:
        yield first, part | {"part": empty, "type": "response.content_part.added"}, None
    text, last = "", first
    for after, delta in _deltas(item, position, replayed):
        if abort_after is not None and after > abort_after:
            break
        text, last = text + delta, after
        yield after, part | {"delta": delta, "type": f"response.{kind}.delta"}, None
    whole = {"arguments": text, "name": item.name} if item.kind == "tool" else {"text": text}
    yield last, part | whole | {"type": f"response.{kind}.done"}, None
    if empty:
        yield last, part | {"part": empty | {"text": text}, "type": "response.content_part.done"}, None
    done = begun | {"status": "completed"}
    done |= {"arguments": text} if item.kind == "tool" else {"content": [empty | {"text": text}]}
    yield last, {"item": done, "type": "response.output_item.done"}, done


def messages_events(
    answer: EventAnswer, engine: str, *, replayed: int = 0, abort_after: int | None = None
) -> list[Told]:
    """The events of `/v1/messages`."""
    told: list[Told] = []

    def tell(after: int, body: dict[str, Any]) -> None:
        told.append(Told(f"event: {body['type']}\ndata: {_dump(body)}\n\n".encode(), after, body))

    message = {
        "id": f"chatcmpl-{engine}", "type": "message", "role": "assistant", "content": [], "model": "tiny",
        "stop_reason": None, "stop_sequence": None, "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
    }  # fmt: skip
    tell(0, {"type": "message_start", "message": message})
    position = 0
    for index, item in enumerate(answer.items):
        if abort_after is not None and position >= abort_after:
            break
        for after, body in _message_block(item, index, engine, position, replayed, abort_after):
            tell(after, {"type": body["type"], "index": index} | body)
        position += len(item.pieces)
    count = answer.count if abort_after is None else abort_after
    stop: str | None = "tool_use" if any(item.kind == "tool" for item in answer.items) else "end_turn"
    if answer.finish == "length":
        stop = "max_tokens"
    if abort_after is not None:
        stop = None
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": count}
    tell(count, {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage})
    tell(count, {"type": "message_stop"})
    return told


def _message_block(
    item: Item, index: int, engine: str, position: int, replayed: int, abort_after: int | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    first = position + min(1, len(item.pieces))
    if replayed > position:
        first = min(replayed, position + len(item.pieces))
    block: dict[str, Any]
    match item.kind:
        case "reasoning":
            block, kind, member = {"type": "thinking", "thinking": ""}, "thinking_delta", "thinking"
        case "text":
            block, kind, member = {"type": "text", "text": ""}, "text_delta", "text"
        case _:
            block = {"type": "tool_use", "id": f"chatcmpl-tool-{engine}{index}", "name": item.name, "input": {}}
            kind, member = "input_json_delta", "partial_json"
    yield first, {"type": "content_block_start", "content_block": block}
    last = first
    for after, delta in _deltas(item, position, replayed):
        if abort_after is not None and after > abort_after:
            break
        last = after
        if delta:
            yield after, {"type": "content_block_delta", "delta": {"type": kind, member: delta}}
    if item.kind == "reasoning":
        signed = {"type": "signature_delta", "signature": f"sign{engine}{index}"}
        yield last, {"type": "content_block_delta", "delta": signed}
    yield last, {"type": "content_block_stop"}


def whole_response(answer: EventAnswer, engine: str) -> bytes:
    """The body of an unstreamed answer of `/v1/responses`."""
    return _dump(responses_events(answer, engine)[-1].body["response"]).encode()


def whole_message(answer: EventAnswer, engine: str, *, aborted: bool = False) -> bytes:
    """The body of an unstreamed answer of `/v1/messages`; one that was given up has no reason to stop."""
    content: list[dict[str, Any]] = []
    for index, item in enumerate(answer.items):
        match item.kind:
            case "reasoning":
                content.append({"type": "thinking", "thinking": item.text, "signature": f"sign{engine}{index}"})
            case "text":
                content.append({"type": "text", "text": item.text})
            case _:
                use = {"type": "tool_use", "id": f"call{engine}{index}", "name": item.name}
                content.append(use | {"input": json.loads(item.text)})
    body = {"id": f"chatcmpl-{engine}", "type": "message", "role": "assistant", "content": content, "model": "tiny"}
    body |= {} if aborted else {"stop_reason": "end_turn"}
    body |= {"usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.count}}
    return _dump(body).encode()


def joined(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events with deltas of one field joined and numbers taken off: what a client that joins deltas has."""
    out: list[dict[str, Any]] = []
    for event in events:
        body = {name: value for name, value in event.items() if name != "sequence_number"}
        last = out[-1] if out else {}
        if _is_delta(body) and _field(body) == _field(last):
            _grow(last, body)
        elif not (_is_delta(body) and not _text(body)):
            out.append(json.loads(json.dumps(body)))
    return out


def _is_delta(body: dict[str, Any]) -> bool:
    return bool(_field(body))


def _field(body: dict[str, Any]) -> tuple[Any, ...]:
    delta = body.get("delta")
    if isinstance(delta, str):
        return (body["type"], body.get("output_index"), body.get("item_id"))
    if isinstance(delta, dict) and delta.get("type") in ("text_delta", "thinking_delta", "input_json_delta"):
        return (delta["type"], body["index"])
    return ()


def _member(body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    if isinstance(body["delta"], str):
        return body, "delta"
    return body["delta"], next(name for name in ("text", "thinking", "partial_json") if name in body["delta"])


def _text(body: dict[str, Any]) -> str:
    owner, name = _member(body)
    return str(owner[name])


def _grow(last: dict[str, Any], body: dict[str, Any]) -> None:
    owner, name = _member(last)
    owner[name] += _text(body)


def _dump(body: dict[str, Any]) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
