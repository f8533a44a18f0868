"""Reads answers with several choices, and checks that they look as one answer."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

Told = tuple[str, list[int], list[float], str]


@dataclass(slots=True)
class Several:
    """One answer: of each choice text, ids, logprobs and finish reason."""

    status: int = 200
    choices: dict[int, Told] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    report: tuple[str, int] = ("", 0)
    names: set[str] = field(default_factory=set)
    done: bool = False
    error: Any = None
    sessions: list[str] = field(default_factory=list)
    raw: list[dict[str, Any]] = field(default_factory=list)

    @property
    def in_order(self) -> list[Told]:
        """The choices, by index."""
        return [self.choices[index] for index in sorted(self.choices)]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Prompt, outputs and all tokens."""
        assert self.usage is not None
        return (self.usage["prompt_tokens"], self.usage["completion_tokens"], self.usage["total_tokens"])

    def token_count(self, index: int) -> int:
        """How many tokens of one choice have come."""
        return len(self.choices.get(index, ("", [], [], ""))[1])

    def take(self, body: dict[str, Any]) -> None:
        """Take a chunk, or a whole answer."""
        self.raw.append(body)
        if "error" in body:
            assert self.error is None, "a second error"
            self.error = body["error"]
            return
        self.names.add(body["id"])
        if body.get("usage") and not body["choices"]:
            assert self.usage is None, "a second usage chunk"
            self.usage = body["usage"]
        for choice in body["choices"]:
            text, ids, logprobs, finish = self.choices.get(choice["index"], ("", [], [], ""))
            assert not finish, f"choice {choice['index']} goes on after its end"
            said = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            self.choices[choice["index"]] = (
                text + said,
                ids + (choice.get("token_ids") or []),
                logprobs + _logprobs(choice.get("logprobs")),
                choice["finish_reason"] or "",
            )


def _logprobs(told: dict[str, Any] | None) -> list[float]:
    if told is None:
        return []
    if "content" in told:
        return [entry["logprob"] for entry in told["content"]]
    return [value for value in told["token_logprobs"] if value is not None]


async def ask_several(
    http: aiohttp.ClientSession,
    base_url: str,
    body: Mapping[str, Any],
    on_chunk: Callable[[Several], object] = lambda told: None,
    **headers: str,
) -> Several:
    """Ask for several choices, streamed or not, and read the whole answer."""
    told = Several()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = {"return_token_ids": True, **body}
    if asked.get("stream"):
        asked["stream_options"] = {"include_usage": True, **asked.get("stream_options", {})}
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    async with http.post(base_url + path, json=asked, headers={"X-Midstream-Report": "1"} | names) as answer:
        told.status = answer.status
        told.sessions = [name for name in answer.headers.get("X-Midstream-Session", "").split(", ") if name]
        if answer.content_type != "text/event-stream":
            told.take(await answer.json())
            told.usage = told.raw[0].get("usage")
            told.report = (
                answer.headers.get("X-Midstream-Outcome", ""),
                int(answer.headers.get("X-Midstream-Takeovers", "0")),
            )
            told.done = answer.status == 200
            return told
        async for line in answer.content:
            if line.startswith(b": midstream outcome="):
                words = dict(word.split("=") for word in line.decode().split()[2:])
                told.report = (words["outcome"], int(words.get("takeovers", 0)))
            elif line.startswith(b"data: "):
                assert not told.done, "an event after [DONE]"
                if line.strip() == b"data: [DONE]":
                    told.done = True
                else:
                    told.take(json.loads(line[6:]))
                    on_chunk(told)
    return told
