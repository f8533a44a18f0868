"""p50, p90 and p99 mean the same in a load test, in a verification's record and page, and in the proxy's benchmark."""

import re
from statistics import median, quantiles
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.loadtest.load import figures
from midstream.loadtest.load.svg import distributions
from midstream.loadtest.percentiles import percentile
from midstream.loadtest.proxy_bench_client import Measured
from midstream.loadtest.verify import plots, record

FEW = [100.0, 200.0, 400.0, 1000.0]


def test_percentiles_lie_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0], 99) == 1.0
    assert percentile([], 99) == 0.0
    assert percentile([float(i) for i in range(101)], 90) == 90.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_they_are_those_of_the_standard_library_and_in_order(values: list[float]) -> None:
    told = [percentile(values, percent) for percent in (50, 90, 99)]
    cuts = quantiles(values, n=100, method="inclusive")
    assert told == pytest.approx([median(values), cuts[89], cuts[98]])
    assert [min(values), *told, max(values)] == sorted([min(values), *told, max(values)])


def test_a_verification_s_record_and_its_plot_say_what_a_load_test_would_say() -> None:
    told = record.percentiles(FEW)
    assert told == {"count": 4, "p50": 300.0, "p90": pytest.approx(820), "p99": pytest.approx(982), "max": 1000.0}
    assert [told[f"p{p}"] for p in figures.PERCENTILES] == pytest.approx(
        [percentile(FEW, p) for p in figures.PERCENTILES]
    )
    picture = ElementTree.fromstring(plots.gaps({"move": FEW}))
    labels = [text for found in picture.iter() if re.match(r"p\d", text := found.text or "")]
    assert labels == ["p50 300 ms", "p90 820 ms"]


def test_the_bar_of_a_load_test_s_plot_is_the_median() -> None:
    assert "kv: median 300 ms" in distributions({"kv": FEW}, "ms")


def test_nothing_measured_has_no_percentiles() -> None:
    assert record.percentiles([]) == {"count": 0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


def test_the_proxy_s_benchmark_means_the_same() -> None:
    assert Measured(4, 1.0, [int(value * 1e6) for value in FEW]).delay_ms(0.5) == 300.0
