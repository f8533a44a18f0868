"""The same plots as pictures (PNG), where matplotlib is installed: `pip install ".[sidecar,loadtest]"`.

Owns the drawing with matplotlib; `page.py` draws its own, so that nothing is missing without it.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .passes import Passed
from .series import cumulative, tokens_per_second


def draw_plots(folder: Path, passed: Sequence[Passed]) -> list[Path]:
    """The pictures' paths; [] without matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = []
    for name, title, unit, values in (
        ("gaps.png", "The client's gap at interruptions", "ms", {p.name: _gaps(p) for p in passed}),
        ("ttft.png", "Time to first token", "ms", {p.name: _ttfts(p) for p in passed}),
        ("itl.png", "Inter-token latency", "ms", {p.name: _itls(p) for p in passed}),
    ):
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        for index, (label, found) in enumerate(values.items()):
            if found:
                points = cumulative(found)
                x, y = [value for value, _ in points], [100 * share for _, share in points]
                # The same colour in each plot, whichever others are empty there.
                axes.step(x, y, where="post", label=label, color=f"C{index}")
        axes.set(title=title, xlabel=unit, ylabel="share of all, %", xscale="log")
        drawn.append(_save(figure, axes, folder / name))
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for index, one in enumerate(passed):
        rates = tokens_per_second(one.records)
        axes.plot(range(len(rates)), rates, label=one.name, color=f"C{index}")
        for entry in one.faults:
            if entry.hit:
                axes.axvline(entry.at_s, color=f"C{index}", linestyle=":", linewidth=0.8)
    axes.set(title="Tokens at the clients", xlabel="s (dotted: faults)", ylabel="tokens a second")
    drawn.append(_save(figure, axes, folder / "tokens.png"))
    return drawn


def _save(figure: "matplotlib.figure.Figure", axes: "matplotlib.axes.Axes", path: Path) -> Path:  # type: ignore[name-defined]  # noqa: F821
    from matplotlib import pyplot

    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _gaps(passed: Passed) -> list[float]:
    return [gap for record in passed.records for gap in record.gaps_ms]


def _ttfts(passed: Passed) -> list[float]:
    return [record.ttft_ms for record in passed.records if record.ttft_ms is not None]


def _itls(passed: Passed) -> list[float]:
    return [itl for record in passed.records for itl in record.itls_ms]
