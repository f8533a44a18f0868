"""Asks a running engine how many tokens a text has: its /tokenize where there is one, else by what usage says.

Owns the asking. What it learns is used to make prompts of a wanted length (`synthetic.py`).
"""

import aiohttp

from ...session.errors import EngineError
from .synthetic import Tokens, text_of
from .workload import COMPLETIONS

SAMPLE_WORDS = 200


async def model_name(http: aiohttp.ClientSession, url: str) -> str:
    """The first model that is served; EngineError when none is told."""
    try:
        async with http.get(f"{url}/v1/models") as answer:
            told = await answer.json()
        return str(told["data"][0]["id"])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}/v1/models: no model is told ({error!r}); is an engine ready behind it?") from error


async def learn_tokens(http: aiohttp.ClientSession, url: str, model: str, seed: int) -> Tokens:
    """How many tokens our words have there, and a way to count exactly where there is one."""
    short, long = text_of(0, -1, seed), text_of(SAMPLE_WORDS, -1, seed)

    async def count(text: str) -> int:
        told = await _tokenize(http, url, model, text)
        if told is None:
            raise EngineError(f"{url}/tokenize: answered at first, and no more; look at the engine's log")
        return told

    can_count = await _tokenize(http, url, model, short) is not None
    if can_count:
        first, most = await count(short), await count(long)
    else:
        first, most = await _usage(http, url, model, short), await _usage(http, url, model, long)
    return Tokens(first, max((most - first) / SAMPLE_WORDS, 0.1), count if can_count else None)


async def _usage(http: aiohttp.ClientSession, url: str, model: str, text: str) -> int:
    body = {"model": model, "prompt": text, "max_tokens": 1}
    try:
        async with http.post(url + COMPLETIONS, json=body) as answer:
            return int((await answer.json())["usage"]["prompt_tokens"])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise EngineError(f"{url}{COMPLETIONS}: no usage is told ({error!r}); give --dataset with prompts") from error


async def _tokenize(http: aiohttp.ClientSession, url: str, model: str, text: str) -> int | None:
    try:
        async with http.post(f"{url}/tokenize", json={"model": model, "prompt": text}) as answer:
            if answer.status != 200:
                return None
            count = (await answer.json())["count"]
            return count if isinstance(count, int) else None
    except (aiohttp.ClientError, ValueError, LookupError, TypeError):
        return None
