"""What a worker writes while it warms up must not reach the blocks of an adopted pool.

The V2 model runner compiles its kernels by running steps of made-up requests in blocks 1, 2, 3 and so on, before the
scheduler exists that could keep off the old sessions' blocks. While it does, connectors are switched off; that is how
such a step is told from a real one. Its blocks become the null block, which no session has: vLLM itself does that where
it shuffles experts. (The V1 runner warms up with slots of -1, which its kernels skip.) Owns nothing.
"""

from typing import Any

from ..guard import patch

NULL_BLOCK = 0


def keep_off() -> bool:
    """Hook the block tables of this worker; False where that cannot be done, and no pool may be adopted then."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    parameters = ("self", "req_index", "new_block_ids", "overwrite")
    return patch(BlockTables, "append_block_ids", parameters, _diverting, needed=False)


def _diverting(original: Any) -> Any:
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    def append_block_ids(self: Any, req_index: int, new_block_ids: Any, overwrite: bool) -> None:
        if not has_kv_transfer_group():
            new_block_ids = tuple([NULL_BLOCK] * len(ids) for ids in new_block_ids)
        original(self, req_index, new_block_ids, overwrite)

    return append_block_ids
