"""Every feature of the embedded engine, interrupted in the midst of an answer: nobody can tell by any field of it."""

import pytest

from support.features import FEATURES, Feature
from support.moving import Ask, Body, Moved, Stage, require_equal

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]


@pytest.mark.parametrize("feature", [pytest.param(feature, id=feature.name) for feature in FEATURES])
async def test_a_feature_goes_on_as_if_nothing_had_happened(stage: Stage, feature: Feature) -> None:
    cuts, body = feature.cuts, {"stream": True, **feature.body}
    if feature.given is not None:
        cut, more = feature.given(await stage.tell(body))
        cuts, body = (cut,), {**body, **more}
    whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    streamed = await came_to(stage, feature, body, cuts, feature.streamed)
    assert f"outcome={feature.streamed} takeovers={len(streamed.cuts)}" in streamed.told.report
    if feature.unstreamed:
        told = (await came_to(stage, feature, whole, cuts, feature.unstreamed)).told.headers
        assert told["X-Midstream-Outcome"] == feature.unstreamed
        assert told["X-Midstream-Takeovers"] == str(len(streamed.cuts))


async def came_to(stage: Stage, feature: Feature, body: Body, cuts: tuple[int, ...], outcome: str) -> Moved:
    """A moved answer, which must be what the undisturbed one is."""
    plain = await stage.tell(body)
    if feature.by_itself:
        moved = await stage.moved_at(body, cuts[0])
    else:
        [moved] = await stage.run(Ask(body, cuts, feature.tier, feature.sessions))
    require_equal(moved.told, plain)
    assert moved.names == [outcome] * len(cuts) * feature.sessions, moved.outcomes
    finishes = {v for k, v in moved.told.values.items() if k.endswith("finish_reason") and v is not None}
    assert finishes == {feature.finish}
    return moved
