"""Times as clouds write them."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from midstream.sidecar.notices.metadata import seconds_until


@pytest.mark.parametrize("write", [lambda at: at.isoformat(), lambda at: format_datetime(at, usegmt=True),
                                   lambda at: at.strftime("%Y-%m-%dT%H:%M:%S")])  # fmt: skip
def test_a_time_is_so_far_away_whoever_writes_it(write: object) -> None:
    assert callable(write)
    assert seconds_until(write(datetime.now(UTC) + timedelta(seconds=90))) == pytest.approx(90, abs=3)


@pytest.mark.parametrize("text", ["", "soon", "None", "Mon, 31 Foo"])
def test_what_is_no_time_is_none(text: str) -> None:
    assert seconds_until(text) is None
