"""Prompts into token ids, and token ids into text.

Owns the tokenizer, twice: Hugging Face's fast tokenizers must not encode while another thread decodes, so the decode
thread has a copy of its own. Prompts are encoded in a worker thread, one at a time; the event loop never waits.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import AutoTokenizer

from ...session.errors import EngineError
from .detokenizer import Decode
from .fields import RequestError
from .protocol import Messages, Request, TokenIds


class Text:
    """The tokenizer of one model folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self._encoder = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._decoder = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:
            # Whatever the library raises, it is about this folder.
            raise EngineError(f"tokenizer of {folder}: {error}; expected a Hugging Face folder") from error
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="encode")

    async def prompt_ids(self, request: Request) -> tuple[int, ...]:
        """The token ids of a request's prompt. RequestError when the chat template refuses the messages."""
        prompt = request.prompt
        if isinstance(prompt, TokenIds):
            return prompt.ids
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._encode, prompt, request)

    def decoder(self, *, skip_special_tokens: bool) -> Decode:
        """A function from ids to text, for the decode thread."""
        decode: Callable[..., str] = self._decoder.decode

        def run(ids: Sequence[int]) -> str:
            return decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

        return run

    def close(self) -> None:
        """End the worker thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _encode(self, prompt: str | Messages, request: Request) -> tuple[int, ...]:
        text = prompt if isinstance(prompt, str) else self._templated(prompt, request)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no text: {error}", param="prompt") from error
        return tuple(self._encoder.encode(text, add_special_tokens=request.add_special_tokens))

    def _templated(self, chat: Messages, request: Request) -> str:
        if not self._encoder.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        messages = [dict(message) for message in chat.items]
        try:
            return str(self._encoder.apply_chat_template(messages, tokenize=False, **request.template))
        except Exception as error:
            # Templates are programs of the model's makers: whatever they raise is about these messages.
            raise RequestError(f"the model's chat template refuses this: {error!s:.300}", param="messages") from error
