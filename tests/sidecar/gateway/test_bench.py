"""The gateway's benchmark works: small loads, no bars (those belong to a quiet machine)."""

import os

import pytest

from midstream.loadtest.gateway_bench import Figures, Plan, measure
from midstream.loadtest.proxy_bench_client import Load


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the benchmark needs two cores")
async def test_the_benchmark_measures_a_real_gateway() -> None:
    before = os.sched_getaffinity(0)
    plan = Plan(
        rounds=1,
        nodes=2,
        delay=Load(streams=2, tokens=20, gap_s=0.005),
        open_streams=Load(streams=20, tokens=2, gap_s=0.2),
        many_nodes=10,
        idle_s=0.5,
    )
    figures = await measure(plan)
    assert os.sched_getaffinity(0) == before
    assert 0 < figures.direct_p50_ms < figures.gateway_p99_ms
    assert figures.open_rss_mib >= figures.idle_rss_mib > 10
    # So short a look may fall between two ticks of the processor's clock.
    assert 0 <= figures.many_idle_cpu < 1


def test_missed_bars_are_named() -> None:
    good = Figures(0.1, 0.25, 0.5, 0.15, 60, 700, 10_000, 500, 1.0, 0.2, 80)
    bad = Figures(0.1, 0.4, 0.5, 0.3, 60, 1500, 9_000, 500, 1.0, 0.2, 80)
    assert good.missed == []
    assert len(bad.missed) == 2
