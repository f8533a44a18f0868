"""The model: loading it, and one forward of one session at a time.

Owns everything numeric. Invariant: the logits of a position depend on the session's own tokens and cache and on the
chunks in which they are computed (engine.py), never on load: a forward always holds exactly one session.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from ...session.errors import EngineError
from .kv import KvShape, RunCache, observed_shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Model:
    """A causal language model with full attention, loaded from a folder."""

    def __init__(self, folder: Path, *, dtype: str, device: str) -> None:
        try:
            self.device = torch.device(device)
        except RuntimeError as error:
            raise EngineError(f"device {device}: unknown; choose --device cpu or cuda") from error
        self.dtype = DTYPES[dtype]
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise EngineError("device cuda: torch sees no GPU here; choose --device cpu")
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            _refuse_stateful_rope(config)
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=self.dtype, attn_implementation="sdpa", local_files_only=True
            )
        except EngineError:
            raise
        except Exception as error:
            # Whatever the library raises is about this folder: missing, torn, or of an architecture it cannot build.
            raise EngineError(f"model {folder}: {error}; expected a Hugging Face folder of a causal model") from error
        self._model = model.to(self.device).eval()
        self.config = model.config
        text_config = model.config.get_text_config()
        self.vocab_size = int(text_config.vocab_size)
        self.context_tokens = int(text_config.max_position_embeddings)
        self.eos_ids = _eos_ids(model)
        # Transformers renamed the argument in 5.x.
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self.kv_shape = self._probe()

    @property
    def attention(self) -> str:
        """The attention implementation in use: it decides about the last bits."""
        return str(self.config._attn_implementation)

    def forward(self, ids: Sequence[int], start: int, cache: RunCache) -> torch.Tensor:
        """Compute positions [start, start + len(ids)) into the cache; logits [vocab] of the last, float32 on CPU."""
        cache.cut(start)
        return self._logits(ids, start, cache)

    def _probe(self) -> KvShape:
        """One forward into a cache of Transformers' own, to see what the model keeps."""
        cache = DynamicCache(config=self.config)
        self._logits([0], 0, cache)
        return observed_shape(cache)

    def _logits(self, ids: Sequence[int], start: int, cache: Any) -> torch.Tensor:
        with torch.inference_mode():
            positions = torch.arange(start, start + len(ids), device=self.device).unsqueeze(0)
            out = self._model(
                input_ids=torch.tensor([list(ids)], dtype=torch.long, device=self.device),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **{self._cache_argument: cache},
            )
            return out.logits[0, -1].to(device="cpu", dtype=torch.float32)


def _refuse_stateful_rope(config: Any) -> None:
    """Dynamic NTK scaling keeps the longest length seen, so one session would change another's numbers."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(config, name, None) or {}
        # Some models have one set of parameters for each kind of layer.
        nested = [part for part in rope.values() if isinstance(part, dict)]
        if any(part.get("rope_type", part.get("type")) == "dynamic" for part in (rope, *nested)):
            raise EngineError(
                "rope_type dynamic depends on what the model has seen before, so streams would not be independent; "
                "use a model with another rope_type"
            )


def _eos_ids(model: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (model.config, model.generation_config):
        value = getattr(config, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
