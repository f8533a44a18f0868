"""vLLM's own parsers under a replay: the first tokens in one piece come to the same events as one by one."""

import json
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import support
from midstream.proxy.dialects.messages import Messages
from midstream.proxy.dialects.responses import Responses
from midstream.proxy.splice import End
from midstream.proxy.splice_events import EventSplicer
from midstream.proxy.sse import Event, SseParser
from midstream.sidecar.environments import VLLM_ENVIRON
from support.event_answers import joined
from support.vllm_models import with_thinking_tokens
from support.vllm_rig import vllm_command, whole_model

pytestmark = [pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(400)]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris 🦀"}}\n</tool_call>'
CASES = {
    "thoughts and text": ("auto", "Let me think.\n</think>\n\nThe answer\r\n is 12 🦀."),
    "two calls": ("auto", f"Hm.</think>Yes.\n{CALL}\n{CALL}"),
    "text after a call": ("auto", f"Hm.</think>{CALL} Done."),
    "required calls": (
        "required",
        'Hm.</think>[{"name": "get_weather", "parameters": {"city": "Paris"}}, '
        '{"name": "get_weather", "parameters": {"city": "Rome"}}]',
    ),
}
DRAWN = re.compile(r'"((?:rs|msg|fc)_|chatcmpl-tool-|)[0-9a-f]{16,32}"')


@cache
def parsed(folder: Path) -> dict[str, Any]:
    thinking = with_thinking_tokens(whole_model(), folder / "thinking")
    script = Path(next(iter(support.__path__))) / "vllm_parsed.py"
    done = subprocess.run(
        [vllm_command()[0], str(script), str(thinking), json.dumps(CASES)],
        env={**os.environ, **VLLM_ENVIRON},
        stdout=subprocess.PIPE,
        check=True,
        timeout=300,
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM says, for each case, API and number of tokens that come in one piece."""
    return parsed(tmp_path_factory.mktemp("model"))


def events(raw: str) -> list[Event]:
    return SseParser().feed(raw.encode())


def nameless(raw: bytes) -> str:
    bodies = [json.loads(event.data or b"") for event in SseParser().feed(raw)]
    return DRAWN.sub(r'"\1"', json.dumps(joined(bodies)))


@pytest.mark.parametrize("api", ["responses", "messages"])
@pytest.mark.parametrize("case", CASES)
def test_a_replay_in_one_piece_goes_on_after_any_event(told: dict[str, Any], api: str, case: str) -> None:
    ways = told[case][api]
    first = ways["0"]
    wanted = nameless("".join(raw for _, raw in first).encode())
    count = len(ways) - 1
    for cut in range(1, len(first)):
        after = first[cut - 1][0]
        for together in {max(1, after), min(count, after + 1), min(count, after + 7), count}:
            splicer = EventSplicer(Responses() if api == "responses" else Messages())
            splicer.begin()
            out = splicer.feed(events("".join(raw for _, raw in first[:cut]))).out
            if splicer.may_close():
                continue
            splicer.begin()
            step = splicer.feed(events("".join(raw for _, raw in ways[str(together)])))
            out += step.out + (splicer.confirm().out if step.end is End.CLAIMED else b"")
            assert step.end in (End.CLAIMED, End.FINISHED), (cut, together, step.text)
            assert nameless(out) == wanted, (cut, together)
