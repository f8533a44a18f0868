"""A real sidecar is asked to park workers where there is no GPU to free: refused with a reason, and nobody notices."""

from collections.abc import Callable

import aiohttp
import pytest

from midstream.session.errors import Refused
from midstream.sidecar.control_client import ControlClient
from support.sidecars import Sidecar, require_whole

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


@pytest.fixture
def there(kept: Callable[[], Sidecar]) -> Sidecar:
    return kept()


async def test_a_worker_without_cuda_is_not_parked_and_takes_sessions_as_before(
    there: Sidecar, http: aiohttp.ClientSession
) -> None:
    await there.ready(http)
    async with ControlClient(there.process.state_dir) as control:
        for worker, verb, codes in (
            ("worker-0", "park", {"bindings", "no_driver", "nvml", "not-cuda"}),
            ("worker-0", "unpark", {"not_parked"}),
            ("worker-9", "park", {"not_parked"}),
        ):
            with pytest.raises(Refused) as caught:
                await control.ask_worker(worker, verb, {})
            assert caught.value.reason in codes, caught.value
    status = await there.status(http)
    assert status["parked"] == {}
    assert {worker["state"] for worker in status["workers"]} == {"ready"}
    body = {"prompt": "Nobody was parked", "max_tokens": 8, "temperature": 0}
    require_whole(await there.whole(http, body))
