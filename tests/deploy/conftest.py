"""One process of Helm's for all tests of a file."""

from collections.abc import Iterator

import pytest

from support.charts import MISSING, WHY_MISSING, Charts, charts


@pytest.fixture(scope="module")
def chart() -> Iterator[Charts]:
    """Renders the chart; without Helm the test is skipped, which says why."""
    if MISSING:
        pytest.skip(WHY_MISSING)
    with charts() as running:
        yield running
