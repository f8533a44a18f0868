"""What the detokenizer of a resumed request begins with: the end of its prompt, where that is as good as all of it.

vLLM's detokenizer decodes the whole prompt, twice, with the first token that it is given: for a prompt of thousands of
tokens that is most of what taking a session up costs the front end. Invariant: the text is the same, to the byte. It is
where the tokenizer decodes by concatenating its tokens' bytes, and the end that is kept begins and ends with whole
characters; wherever this cannot be seen to be so, all of the prompt is left to be decoded.
"""

from collections.abc import Sequence
from typing import Any

from ..guard import guarded

TAIL_TOKENS = 64
# What half a character is decoded to.
HALF = "\ufffd"


@guarded(default=None)
def begin_with_tail(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Have a detokenizer that has decoded nothing yet begin with the end of its prompt, if nobody can tell."""
    from tokenizers.decoders import ByteLevel, DecodeStream
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    if type(detokenizer) is not FastIncrementalDetokenizer or type(detokenizer.stream) is not DecodeStream:
        return
    if prompt is None or len(prompt) <= TAIL_TOKENS or detokenizer.token_ids:
        return
    if not isinstance(detokenizer.tokenizer.decoder, ByteLevel):
        return
    tail, skips = list(prompt[-TAIL_TOKENS:]), detokenizer.skip_special_tokens
    text = detokenizer.tokenizer.decode(tail, skip_special_tokens=skips)
    # With nothing, or half a character, before it, the first text would be that of the prompt as well.
    if text and not text.startswith(HALF) and not text.endswith(HALF):
        detokenizer.stream = DecodeStream(ids=tail, skip_special_tokens=skips)
