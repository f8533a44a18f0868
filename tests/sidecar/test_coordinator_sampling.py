"""An engine whose random state nothing rebuilds: greedy sessions of it are exact, sampled ones never are."""

from pathlib import Path
from typing import Any

import pytest

from midstream.proxy.coordinator import SessionFacts
from midstream.proxy.policy import Policy
from midstream.session.errors import Refused
from midstream.sidecar.workers import Epoch
from support.coordinating import Rig, S


def asked(**body: Any) -> SessionFacts:
    return SessionFacts(S, "/v1/completions", body, stream=True, policy=Policy.EXACT)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    epoch: Epoch = rig.start("one").epoch
    epoch.facts = {**epoch.facts, "inexact_sampled": ["random_state"]}
    return rig


@pytest.mark.parametrize("body", [{}, {"temperature": 1}, {"temperature": 0.7, "seed": 3}, {"temperature": None}])
async def test_a_sampled_request_that_must_be_exact_is_refused_beforehand(rig: Rig, body: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="one: random_state") as refused:
        await rig.coordinator.admit(asked(**body))
    assert refused.value.reason == "not_exact"


async def test_a_greedy_one_is_served(rig: Rig) -> None:
    assert (await rig.coordinator.admit(asked(temperature=0))).worker == "one"


async def test_a_sampled_one_goes_where_it_can_be_exact(rig: Rig) -> None:
    rig.start("two")
    assert (await rig.coordinator.admit(asked(temperature=1))).worker == "two"
