"""What two stored moments have in common, and where they part. Pure."""

from dataclasses import dataclass

from ..session.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Difference:
    """Two moments compared.

    `first_other_output` is the number (from 1) of the first output that differs, 0 if one is the beginning of the
    other. `equal_blocks` are leading blocks with the same bytes; where outputs agree for longer than these blocks,
    their KV was computed otherwise (`same_kv`: it was not).
    """

    same_prompt: bool
    same_key: bool
    key_differs_in: tuple[str, ...]
    kv_len: tuple[int, int]
    outputs: tuple[int, int]
    common_outputs: int
    first_other_output: int
    equal_blocks: int
    comparable_blocks: int

    @property
    def same_kv(self) -> bool:
        """Whether all blocks that both have whole, of the same tokens, are equal."""
        return self.equal_blocks >= self.comparable_blocks

    @property
    def same_run(self) -> bool:
        """Whether one may be an earlier moment of the other."""
        return self.same_prompt and self.same_key and not self.first_other_output and self.same_kv


def compare(first: Manifest, second: Manifest) -> Difference:
    """Compare two snapshots."""
    same_prompt = (first.prompt_len, first.prompt_hash) == (second.prompt_len, second.prompt_hash)
    names = first.key.keys() | second.key.keys()
    differing = tuple(sorted(n for n in names if first.key.get(n, ...) != second.key.get(n, ...)))
    common = _common(first.outputs, second.outputs)
    shorter = min(len(first.outputs), len(second.outputs))
    blocks = 0
    same_form = (first.fingerprint, first.block_tokens) == (second.fingerprint, second.block_tokens)
    if same_prompt and same_form:
        # The KV of an output depends on it and on all before it; a block counts if all its positions agree.
        agreeing = min(first.prompt_len + common, first.kv_len, second.kv_len)
        blocks = agreeing // first.block_tokens
    return Difference(
        same_prompt=same_prompt,
        same_key=not differing,
        key_differs_in=differing,
        kv_len=(first.kv_len, second.kv_len),
        outputs=(len(first.outputs), len(second.outputs)),
        common_outputs=common,
        first_other_output=common + 1 if common < shorter else 0,
        equal_blocks=_common(first.chunks[:blocks], second.chunks[:blocks]),
        comparable_blocks=blocks,
    )


def _common(first: tuple[object, ...], second: tuple[object, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
