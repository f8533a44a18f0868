"""The proxy's benchmark works: small loads, no bars (those belong to a quiet machine)."""

import os

import pytest

from midstream.loadtest.proxy_bench import Figures, Plan, measure
from midstream.loadtest.proxy_bench_client import Load


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the benchmark needs two cores")
async def test_the_benchmark_measures_a_real_proxy() -> None:
    before = os.sched_getaffinity(0)
    plan = Plan(
        rounds=1,
        delay=Load(streams=2, tokens=20, gap_s=0.005),
        flood=Load(streams=4, tokens=100, gap_s=0),
        paced=Load(streams=4, tokens=50, gap_s=0.005),
        open_streams=Load(streams=20, tokens=2, gap_s=0.2),
    )
    figures = await measure(plan)
    assert os.sched_getaffinity(0) == before
    assert 0 < figures.direct_p50_ms < figures.direct_p99_ms + 1e-9
    assert figures.proxy_p50_ms > figures.direct_p50_ms / 10
    assert figures.proxy_flood_per_s > 0
    assert figures.paced_cpu > 0
    assert figures.open_rss_mib >= figures.idle_rss_mib > 10


def test_missed_bars_are_named() -> None:
    good = Figures(0.1, 0.2, 0.2, 0.3, 0.1, 9e4, 5e4, 2e4, 1, 0.5, 20, 40, 100, 2000)
    bad = Figures(0.1, 0.2, 0.4, 0.5, 0.3, 9e4, 1e4, 2e4, 1, 0.5, 20, 40, 400, 2000)
    assert good.missed == []
    assert len(bad.missed) == 3
