"""What a session is told that loses its worker while the sidecar is being stopped."""

import pytest

from midstream.proxy.coordinator import Reason, SessionFacts
from midstream.session.errors import Refused
from midstream.session.ids import SessionId
from midstream.sidecar.coordinator import CoordinatorSettings, SidecarCoordinator
from midstream.sidecar.metrics import Metrics
from midstream.sidecar.mover.client import MoverClient
from midstream.sidecar.supervise import WorkerState
from midstream.sidecar.workers import Workers


@pytest.mark.parametrize("draining", [True, False])
async def test_a_refusal_names_why_no_worker_is_coming(draining: bool) -> None:
    workers = Workers(let_go=lambda epoch: None)
    worker = workers.add("w0", "http://127.0.0.1:9")
    epoch = workers.begin_epoch(worker, 1, None)
    workers.became(worker, WorkerState.READY)
    coordinator = SidecarCoordinator(workers, MoverClient("/nonexistent"), Metrics(), CoordinatorSettings())
    facts = SessionFacts(SessionId("5" * 32), "/v1/completions", {"prompt": "x"}, stream=True)
    placement = await coordinator.admit(facts)
    coordinator.draining = draining
    workers.became(worker, WorkerState.FAILED)
    coordinator.epoch_lost(epoch, Reason.PROCESS_DEATH)
    with pytest.raises(Refused) as refused:
        await coordinator.take_over(facts, placement, Reason.PROCESS_DEATH, ())
    assert refused.value.reason == ("draining" if draining else "no_worker")
    assert ("being stopped" in str(refused.value)) == draining
