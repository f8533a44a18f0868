"""Where values lie on the axis that all plots share, and that a picture says what it is."""

from xml.etree import ElementTree

import pytest

from midstream.loadtest.drawing import LogAxis, frame
from midstream.loadtest.load.svg import curves, distributions
from midstream.loadtest.verify import plots


def test_a_decade_is_as_wide_as_any_other_and_the_ends_are_the_ends() -> None:
    axis = LogAxis(100.0, 400.0, 0, 3)
    assert [axis.at(value) for value in (1, 10, 100, 1000)] == pytest.approx([100, 200, 300, 400])


@pytest.mark.parametrize(
    "picture",
    [
        distributions({"kv": [1.0, 10.0]}, "ms"),
        curves([(0.0, 1.0), (1.0, 5.0)], [], "s", "tokens/s"),
        plots.gaps({"move": [120.0]}),
        plots.matrix([], ["p"], ["first"]),
        frame(1, 1, '<"&', "") + "</svg>",
    ],
)
def test_every_picture_is_whole_and_says_what_it_is(picture: str) -> None:
    root = ElementTree.fromstring(picture)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert root.get("viewBox")
