"""Run by vLLM's interpreter: what its front end makes of a text, token by token or with the first ones in one piece.

No engine is started. Tokenizer and parsers, the processor of Responses' events and the converter of Messages are
vLLM's; the chunks between parser and converter are made here, as its chat stream makes them. Prints one JSON object:
for each case and API the events of each way to cut the text, each with the number of tokens after which it comes.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from transformers import AutoTokenizer
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.streaming_events import SimpleStreamingEventProcessor, split_delta
from vllm.parser import ParserManager

PROMPT_IDS = [1, 2]
FUNCTION = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
Pieces = list[tuple[str, list[int]]]
Told = list[tuple[int, str]]


def pieces_of(tokenizer: Any, text: str) -> Pieces:
    """Each token with the text that it adds; half a character adds none."""
    ids, pieces, before = tokenizer.encode(text), [], ""
    for count in range(1, len(ids) + 1):
        now = tokenizer.decode(ids[:count], skip_special_tokens=False)
        whole = not now.endswith("\ufffd")
        pieces.append((now[len(before) :] if whole else "", [ids[count - 1]]))
        before = now if whole else before
    return pieces


def deltas(parser: Any, request: Any, pieces: Pieces, together: int) -> Iterator[tuple[int, Any, bool]]:
    """What the parser says after each piece, the first `together` of which come at once."""
    first = ("".join(text for text, _ in pieces[:together]), [i for _, ids in pieces[:together] for i in ids])
    sequence = ([first] if together else []) + pieces[together:]
    for index, (text, ids) in enumerate(sequence):
        last = index == len(sequence) - 1
        delta = parser.parse_delta(text, ids, request, prompt_token_ids=PROMPT_IDS, finished=last)
        yield (together or 1) + index, delta, last


def responses(parser: Any, choice: str, pieces: Pieces, together: int) -> Told:
    """Events of `/v1/responses`."""
    tools = [{"type": "function", **FUNCTION}]
    request = ResponsesRequest(model="m", input="hi", tools=tools, tool_choice=choice, stream=True)
    processor = SimpleStreamingEventProcessor(tools=request.tools)
    created = {"type": "response.created", "response": {"id": "r", "created_at": 1}, "sequence_number": 0}
    told: Told = [(0, f"event: response.created\ndata: {json.dumps(created)}\n\n")]

    def tell(after: int, events: list[Any]) -> None:
        for event in events:
            event.sequence_number = len(told)
            told.append((after, f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n"))

    for after, whole, _ in deltas(parser, request, pieces, together):
        for delta in split_delta(whole) if whole else ():
            state, call = processor.resolve_target_state(delta)
            if state.name == "NONE":
                continue
            if processor.needs_transition(state, call):
                tell(after, processor.close_current())
                tell(after, processor.open(state, call))
            tell(after, processor.emit_delta(delta, None, lambda output: []))
    tell(len(pieces), processor.close_current())
    done = {"type": "response.completed", "response": {"id": "r"}, "sequence_number": len(told)}
    return [*told, (len(pieces), f"event: response.completed\ndata: {json.dumps(done)}\n\n")]


def messages(parser: Any, choice: str, pieces: Pieces, together: int) -> Told:
    """Events of `/v1/messages`."""
    tools = [{"type": "function", "function": FUNCTION}]
    asked = [{"role": "user", "content": "hi"}]
    request = ChatCompletionRequest(model="m", messages=asked, tools=tools, tool_choice=choice, stream=True)
    now = 0

    def chunk(choices: list[Any], **more: Any) -> str:
        body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
        return f"data: {json.dumps(body)}\n\n"

    async def chunks() -> AsyncIterator[str]:
        nonlocal now
        yield chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        called = False
        for now, delta, last in deltas(parser, request, pieces, together):  # noqa: B007
            if delta is None and not last:
                continue
            delta = delta or DeltaMessage()
            called = called or bool(delta.tool_calls)
            finish = ("tool_calls" if called else "stop") if last else None
            told = {"index": 0, "delta": json.loads(delta.model_dump_json(exclude_unset=True)), "finish_reason": finish}
            yield chunk([told])
        usage = {"prompt_tokens": 2, "completion_tokens": len(pieces), "total_tokens": 2 + len(pieces)}
        yield chunk([], usage=usage)
        yield "data: [DONE]\n\n"

    async def converted() -> Told:
        converter = AnthropicServingMessages.message_stream_converter(None, chunks())
        return [(now, event) async for event in converter]

    return asyncio.run(converted())


def main() -> None:
    """Arguments: the model's folder, and JSON with cases: name -> [tool choice, text]."""
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    made = ParserManager.get_parser(
        tool_parser_name="hermes",
        reasoning_parser_name="deepseek_r1",
        enable_auto_tools=True,
        tokenizer=tokenizer,
        model_name="m",
    )
    said: dict[str, dict[str, dict[int, Told]]] = {}
    for name, (choice, text) in json.loads(sys.argv[2]).items():
        pieces = pieces_of(tokenizer, text)
        for api, make in (("responses", responses), ("messages", messages)):
            ways = said.setdefault(name, {}).setdefault(api, {})
            for together in range(len(pieces) + 1):
                parser = made(tokenizer, None, chat_template_kwargs={})
                parser.set_prompt_token_ids(PROMPT_IDS)
                ways[together] = make(parser, choice, pieces, together)
    print(json.dumps(said))


main()
