"""Whether the KV of one place is what a session needs in another. Pure.

Invariant: `check_match` returns only if every byte of the needed positions means the same in both places. There is no
"close enough"; whatever differs is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...session.ids import SessionId
from .protocol import MoverError, Reason


@dataclass(frozen=True, slots=True)
class SessionKv:
    """KV of the positions [0, kv_len) of a session, as it is somewhere or as it is needed somewhere.

    `block_form` is (layout fingerprint, tokens a block, bytes a block), `prompt` is (length, hash). Each of `ranks` has
    its part of a block.
    """

    session: SessionId
    key: Mapping[str, Any]
    block_form: tuple[str, int, int]
    prompt: tuple[int, str]
    outputs: Sequence[int]
    kv_len: int
    ranks: int = 1


def check_match(offered: SessionKv, needed: SessionKv) -> None:
    """Raise MoverError unless `needed` can be made of `offered`."""
    name = f"session {needed.session}"
    if offered.session != needed.session:
        raise MoverError(Reason.SESSION, f"{name}: this is KV of session {offered.session}")
    if offered.key != needed.key:
        names = offered.key.keys() | needed.key.keys()
        different = sorted(n for n in names if offered.key.get(n, ...) != needed.key.get(n, ...))
        raise MoverError(Reason.KEY, f"{name}: the engines differ in {', '.join(different)}")
    if offered.ranks != needed.ranks:
        raise MoverError(
            Reason.RANKS, f"{name}: its KV is in parts of {offered.ranks} ranks, its new engine has {needed.ranks}"
        )
    if offered.block_form != needed.block_form:
        raise MoverError(
            Reason.LAYOUT, f"{name}: blocks are laid out differently ({offered.block_form}, {needed.block_form})"
        )
    if offered.prompt != needed.prompt:
        raise MoverError(Reason.PROMPT, f"{name}: its prompt has other tokens in the new engine")
    if list(offered.outputs[: len(needed.outputs)]) != list(needed.outputs):
        raise MoverError(Reason.TOKENS, f"{name}: what was re-entered is not what was journaled")
    if offered.kv_len < needed.kv_len:
        raise MoverError(
            Reason.INCOMPLETE, f"{name}: there is KV of {offered.kv_len} positions, {needed.kv_len} are needed"
        )
