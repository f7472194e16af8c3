"""Chart: a step as a picture, one row a stage."""

from __future__ import annotations

from os import PathLike

from rpcpipe.schedule import Simulation

__all__ = ["plot"]

COLORS = {"F": "#4c78a8", "R": "#f2cf5b", "B": "#e45756"}
NAMES = {"F": "forward", "R": "recompute", "B": "backward"}
LABELLED = 0.02  # of the width: a narrower task has no room for its number


def plot(path: str | PathLike[str], step: Simulation, bubble: float, ideal: float) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as exc:
        raise ImportError(
            "plot() draws with matplotlib, which is not installed: pip install 'rpcpipe[plot]'"
        ) from exc
    n, makespan = len(step.spans), step.makespan
    # A figure of its own and not pyplot's: no window, no state that the caller shares.
    figure = Figure(figsize=(9, 0.9 + 0.45 * n), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for j, stage in enumerate(step.spans):
        for task, start, end in stage:
            axes.barh(
                j, 1e3 * (end - start), left=1e3 * start, height=0.8,
                color=COLORS[task.kind], edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if end - start > LABELLED * makespan:
                axes.text(5e2 * (start + end), j, str(task.i), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(n), [f"stage {j}" for j in range(n)])
    axes.invert_yaxis()
    axes.set_xlim(0, 1e3 * makespan)
    axes.set_xlabel(f"milliseconds; bubble {bubble:.0%}, at best {ideal:.0%}")
    kinds = dict.fromkeys(span.task.kind for stage in step.spans for span in stage)
    handles = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
