"""What SGLang's wheel lacks on a CPU: put right in each of an environment's processes, before SGLang is imported.

SGLang's wheel is made for GPUs; its builds for CPUs come from source. This module is copied into an environment
(sidecar/environments.py) beside a `.pth` file that imports it, because SGLang spawns its processes and each of them
imports everything anew. It waits for six modules and changes them as they are imported:
* torchvision describes two operators that only its own build of torch registers: they are declared, and never called;
* the hash that keys seeded sampling is a kernel for GPUs: here it is the same numbers by torch;
* pages of several tokens are handed out by kernels: here it is the same pages by torch;
* attention by torch counts as deterministic, which it is: requests are computed one after the other;
* kernels that do not depend on the batch are for GPUs; torch's products of float32 are taken as they are;
* what a grammar rules out is masked by a kernel: here xgrammar's own function for CPUs does it.
Standard library only, and no part of the plugin: an engine that others built needs nothing of it.
"""

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MASK = 0xFFFFFFFF
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def declare_operators(_: Any) -> None:
    """Declare what torchvision's compiled part would have registered."""
    import torch

    for schema in _OPERATORS:
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", schema.removeprefix(name))


def hash_by_torch(module: Any) -> None:
    """Replace the hash of seeds, positions and columns."""
    module.murmur_hash32 = murmur_hash32


def pages_by_torch(module: Any) -> None:
    """Replace the kernels that hand out pages."""
    module.alloc_extend_kernel = _Launched(_extend)
    module.alloc_decode_kernel = _Launched(_decode)


class _Launched:
    """A function that is called as kernels are: `kernel[grid](...)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def _extend(before: Any, after: Any, last: Any, free: Any, out: Any, rows: int, page_size: int) -> None:
    """Slots of the positions `before` to `after` of each row, one after the other into `out`.

    First what is left of the row's last page, which ends at slot `last`; then whole pages off the front of `free`.
    """
    import torch

    done = taken = 0
    for start, end, slot in zip(before.tolist(), after.tolist(), last.tolist(), strict=True):
        rest = min(end, -(-start // page_size) * page_size) - start
        out[done : done + rest] = torch.arange(slot + 1, slot + 1 + rest)
        done += rest
        count = end - start - rest
        pages = -(-count // page_size)
        slots = free[taken : taken + pages, None] * page_size + torch.arange(page_size)
        # Fewer than are asked for where pages ran out, which the allocator finds out by itself.
        given = slots.reshape(-1)[:count]
        out[done : done + len(given)] = given
        done, taken = done + count, taken + pages


def _decode(after: Any, last: Any, free: Any, out: Any, rows: int, page_size: int) -> None:
    """The slot of one more position of each row, whose last one is in slot `last`."""
    taken = 0
    for row, (end, slot) in enumerate(zip(after.tolist(), last.tolist(), strict=True)):
        if end % page_size != 1:
            out[row] = slot + 1
        elif taken < len(free):
            out[row], taken = free[taken] * page_size, taken + 1


def attention_by_torch(module: Any) -> None:
    """Let deterministic inference choose attention by torch."""
    module.add_deterministic_attention_backend_choices(["torch_native"])


def without_kernels(module: Any) -> None:
    """Leave torch's products as they are."""
    module.enable_batch_invariant_mode = lambda enable_bmm=True: None


def masks_by_xgrammar(module: Any) -> None:
    """Let grammars limit logits that lie in host memory, too; others stay with SGLang."""
    original = module.XGrammarGrammar.apply_vocab_mask

    def apply_vocab_mask(self: Any, logits: Any, vocab_mask: Any) -> None:
        if logits.device.type != "cpu":
            original(self, logits, vocab_mask)
            return
        sys.modules["xgrammar"].apply_token_bitmask_inplace(logits, vocab_mask)

    module.XGrammarGrammar.apply_vocab_mask = apply_vocab_mask


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 of (seed: 64 bits, position: 32, column: 32) for each row and column: int64 [rows, columns].

    As in SGLang's kernel; `seed` and `positions` are [rows], `col_indices` is [columns].
    """
    import torch

    seeds = seed.to(torch.int64).unsqueeze(1)
    places = positions.to(torch.int64).unsqueeze(1) & _MASK
    mixed = torch.zeros_like(seeds)
    for key in (seeds & _MASK, (seeds >> 32) & _MASK, places, col_indices.to(torch.int64).unsqueeze(0) & _MASK):
        mixed = _mixed(mixed, key)
    mixed = mixed ^ 16
    mixed = _times(mixed ^ (mixed >> 16), 0x85EBCA6B)
    mixed = _times(mixed ^ (mixed >> 13), 0xC2B2AE35)
    return mixed ^ (mixed >> 16)


def _mixed(state: Any, key: Any) -> Any:
    key = _times(_rotated(_times(key, 0xCC9E2D51), 15), 0x1B873593)
    return (_rotated(state ^ key, 13) * 5 + 0xE6546B64) & _MASK


def _times(value: Any, factor: int) -> Any:
    # In two halves: a product of two 32-bit numbers does not fit into what torch has signed 64 bits for.
    return ((value & 0xFFFF) * factor + ((((value >> 16) * factor) & 0xFFFF) << 16)) & _MASK


def _rotated(value: Any, bits: int) -> Any:
    return ((value << bits) | (value >> (32 - bits))) & _MASK


def _nothing(_: Any) -> None:
    """No change."""


# Of each module, what happens before it runs and what after.
_CHANGES: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "torchvision": (declare_operators, _nothing),
    "sglang.srt.layers.utils.hash": (_nothing, hash_by_torch),
    "sglang.srt.mem_cache.triton_ops.allocator": (_nothing, pages_by_torch),
    "sglang.srt.server_args": (_nothing, attention_by_torch),
    "sglang.srt.batch_invariant_ops": (_nothing, without_kernels),
    "sglang.srt.constrained.xgrammar_backend": (_nothing, masks_by_xgrammar),
}


class _Changing(Loader):
    """Loads a module as ever, with its changes."""

    def __init__(self, inner: Loader, name: str) -> None:
        self._inner = inner
        self._before, self._after = _CHANGES[name]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._before(module)
        self._inner.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:
        # Resources, sources and the like are the real loader's.
        return getattr(self._inner, name)


class _Finder(MetaPathFinder):
    """Finds the modules that are changed, where they are."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, fullname)
        return spec


def install() -> None:
    """Wait for the modules; once in a process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
