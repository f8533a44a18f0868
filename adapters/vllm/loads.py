"""What travels from scheduler to workers with each step: its number, and loads that were begun."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(slots=True)
class Load:
    """A resumed request whose blocks the mover fills (`in_place`: they are filled already)."""

    request_id: str
    session: str
    generation: int
    slot_index: int
    tokens: int
    blocks: list[int]
    in_place: bool


@dataclass
class StepMeta(KVConnectorMetadata):
    """Loads begun in this step, and its number; 0 where that is not known."""

    loads: list[Load] = field(default_factory=list)
    step: int = 0
