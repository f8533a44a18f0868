"""Every feature of the embedded engine, interrupted in the midst of an answer: nobody can tell by any field of it."""


import pytest

from support.features import FEATURES, Feature
from support.moving import Ask, Moved, Stage, require_equal
from support.told import Told

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

# A move is ordered in time, but a busy machine may be late by a token or two; where the place matters, it tries again.
TRIES = 5


@pytest.mark.parametrize("feature", [pytest.param(feature, id=feature.name) for feature in FEATURES])
async def test_a_feature_goes_on_as_if_nothing_had_happened(stage: Stage, feature: Feature) -> None:
    cuts, body = feature.cuts, {"stream": True, **feature.body}
    if feature.given is not None:
        cut, more = feature.given(await stage.tell(body))
        cuts, body = (cut,), {**body, **more}
    whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    asks = [Ask(body, cuts, feature.tier, feature.sessions), Ask(body, sessions=feature.sessions)]
    if feature.unstreamed:
        asks += [Ask(whole, cuts, feature.tier, feature.sessions), Ask(whole, sessions=feature.sessions)]
    streamed, plain, *unstreamed = await stage.run(*asks)
    require_came_to(streamed, plain.told, feature.streamed, feature)
    assert f"outcome={feature.streamed} takeovers={len(cuts) * feature.sessions}" in streamed.told.report
    if feature.unstreamed:
        require_came_to(unstreamed[0], unstreamed[1].told, feature.unstreamed, feature)


def require_came_to(moved: Moved, wanted: Told, outcome: str, feature: Feature) -> None:
    require_equal(moved.told, wanted)
    assert set(moved.names) == {outcome}, moved.outcomes
    assert len(moved.names) == len(moved.cuts)
    finishes = {v for k, v in moved.told.values.items() if k.endswith("finish_reason") and v is not None}
    assert finishes == {feature.finish}
