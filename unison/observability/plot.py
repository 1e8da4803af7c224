"""The picture of a run, drawn from its metrics.jsonl alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from unison.core.errors import UnisonError
from unison.observability.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#22272e"
GREY: Final = "#8b949e"
GRID: Final = "#e6e9ed"
BLUE: Final = "#2f6fde"
ORANGE: Final = "#d9730d"
GREEN: Final = "#2a9d6f"
PURPLE: Final = "#8250df"
RED: Final = "#cf3d4b"


class PlotError(UnisonError, RuntimeError):
    """The plot cannot be drawn on this installation."""


def draw_plot(metrics_path: str | Path, out_path: str | Path, title: str) -> None:
    """Draw reward, held-out accuracy, lengths, KL and entropy, and mismatch over the steps as PNG.

    A panel whose metrics were never logged says so. Raises DataError for a broken metrics file, and
    PlotError without matplotlib.
    """
    history = History.read(metrics_path)
    figure, axes = _figure(title)
    panels: list[tuple[str, Callable[[Axes, History], bool]]] = [
        ("Reward in training", _reward),
        ("Held-out accuracy", _accuracy),
        ("Response length and truncation", _length),
        ("KL and entropy", _kl_and_entropy),
        ("Mismatch of rollout and training", _mismatch),
        ("Throughput", _throughput),
    ]
    for ax, (name, draw) in zip(axes, panels, strict=True):
        ax.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=26)
        _style(ax)
        first, last = history.span
        ax.set_xlim(first - 0.5 - 0.02 * (last - first), last + 0.5 + 0.02 * (last - first))
        if not draw(ax, history):
            _say_empty(ax)
    with warnings.catch_warnings():
        # A title may hold letters the font has not; a box in a picture is no reason to warn.
        warnings.filterwarnings("ignore", message="Glyph")
        figure.savefig(out_path, format="png", dpi=130, facecolor="white")


def _figure(title: str) -> tuple[Figure, list[Axes]]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        raise PlotError("drawing the plot needs matplotlib: pip install matplotlib, or --log.plot false") from None
    figure = Figure(figsize=(14, 8), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.15))
    FigureCanvasAgg(figure)
    safe = title.replace("$", r"\$")  # matplotlib would read mathematics between dollars
    figure.suptitle(safe, x=0.012, ha="left", fontsize=15, fontweight="bold", color=INK)
    return figure, list(figure.subplots(2, 3).flat)


def _style(ax: Axes, *, right: bool = False) -> None:
    from matplotlib.ticker import MaxNLocator

    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(side == "bottom")
        ax.spines[side].set_color(GRID)
        ax.spines[side].set_zorder(0.5)
    ax.tick_params(colors=GREY, labelsize=9, length=0)
    if not right:
        ax.grid(axis="y", color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.set_xlabel("step", fontsize=9, color=GREY)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _say_empty(ax: Axes) -> None:
    ax.text(0.5, 0.5, "not logged in this run", ha="center", va="center", color=GREY, transform=ax.transAxes)
    ax.set_xticks([])
    ax.set_yticks([])


def _line(ax: Axes, x: list[float], y: list[float], color: str, label: str, **style: Any) -> None:
    marker = {"marker": "o", "markersize": 4} if len(x) <= 30 else {}
    if len(x) == 1:
        style.pop("marker", None)  # a line of one point would not show
    # Unclipped, so that a line along the edge (a share of 0) keeps its whole width.
    ax.plot(x, y, **{"color": color, "label": label, "linewidth": 1.8, "clip_on": False, **marker, **style})


def _legend(*axes: Axes) -> None:
    """One legend for all axes of a panel, between title and picture."""
    found = [pair for ax in axes for pair in zip(*ax.get_legend_handles_labels(), strict=True)]
    axes[-1].legend(
        [handle for handle, _ in found],
        [label for _, label in found],
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        ncols=len(found),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        borderpad=0,
        borderaxespad=0.5,
        handlelength=1.4,
        columnspacing=1.2,
    )


def _reward(ax: Axes, history: History) -> bool:
    x, mean = history.series("rollout/reward_mean")
    if not x:
        return False
    at, middle, spread = history.series("rollout/reward_mean", "rollout/reward_std")
    low = [m - s for m, s in zip(middle, spread, strict=True)]
    high = [m + s for m, s in zip(middle, spread, strict=True)]
    if len(at) == 1:
        ax.errorbar(at, middle, yerr=[spread, spread], color=BLUE, alpha=0.35, capsize=4, linewidth=1.5)
    else:
        ax.fill_between(at, low, high, color=BLUE, alpha=0.12, linewidth=0, label="± standard deviation")
    _line(ax, x, mean, BLUE, "mean")
    _legend(ax)
    return True


def _accuracy(ax: Axes, history: History) -> bool:
    values: list[float] = []
    for name, color, label, above_by in (
        ("eval/accuracy_greedy", ORANGE, "greedy", 8),
        ("eval/accuracy", BLUE, "sampled", -16),
    ):
        x, y = history.series(name)
        if not x:
            continue
        at, middle, low, high = history.series(name, f"{name}_ci_low", f"{name}_ci_high")
        below = [max(0.0, m - bound) for m, bound in zip(middle, low, strict=True)]
        above = [max(0.0, bound - m) for m, bound in zip(middle, high, strict=True)]
        ax.errorbar(at, middle, yerr=[below, above], color=color, alpha=0.45, capsize=4, linewidth=1.4, fmt="none")
        _line(ax, x, y, color, label, marker="o", markersize=6)
        for step, value in {(x[0], y[0]), (x[-1], y[-1])}:
            _annotate(ax, step, value, color, above_by)
        values += y
    if values:
        _from_zero(ax, values)
        first, last = ax.get_xlim()
        ax.set_xlim(first, last + 0.08 * (last - first))  # room for the last value
        _legend(ax)
    return bool(values)


def _annotate(ax: Axes, x: float, y: float, color: str, above_by: int) -> None:
    ax.annotate(
        f"{y:.2f}", (x, y), (7, above_by), textcoords="offset points", color=color, fontsize=9, fontweight="bold"
    )


def _length(ax: Axes, history: History) -> bool:
    x, mean = history.series("rollout/length_mean")
    if not x:
        return False
    at, shortest, longest = history.series("rollout/length_min", "rollout/length_max")
    if at:
        ax.fill_between(at, shortest, longest, color=GREEN, alpha=0.12, linewidth=0, label="min to max")
    _line(ax, x, mean, GREEN, "mean, tokens")
    _from_zero(ax, mean)
    steps, share = history.series("rollout/truncated_share")
    if not steps:
        _legend(ax)
        return True
    right = _right_axis(ax, RED)
    _line(right, steps, [100 * value for value in share], RED, "truncated, %", linestyle="--", marker="")
    _from_zero(right, share)
    right.set_ylim(top=max(10.0, 110 * max(share)))
    _legend(ax, right)
    return True


def _kl_and_entropy(ax: Axes, history: History) -> bool:
    x, entropy = history.series("train/entropy")
    steps, kl = history.series("train/kl")
    if not steps:  # of a KL in the reward
        steps, kl = history.series("train/reward_kl")
    if x:
        _line(ax, x, entropy, PURPLE, "entropy, nats")
        _from_zero(ax, entropy)
    if steps:
        side = _right_axis(ax, ORANGE) if x else ax
        _line(side, steps, kl, ORANGE, "KL to reference, nats", linestyle="--", marker="")
        side.set_ylim(min(0.0, 1.1 * min(kl)), max(1e-3, 1.1 * max(kl)))
        _legend(*([ax, side] if x else [ax]))
    elif x:
        _legend(ax)
    return bool(x or steps)


def _mismatch(ax: Axes, history: History) -> bool:
    x, largest = history.series("rollout/logp_diff_max")
    if not x:
        return False
    _line(ax, x, largest, RED, "largest |Δ log-prob|, nats")
    if any(largest):
        at, mean = history.series("rollout/logp_diff_mean")
        _line(ax, at, mean, ORANGE, "mean", linestyle="--", marker="")
        _from_zero(ax, largest)
    else:
        ax.set_ylim(0, 1)
        ax.set_yticks([0])
        steps = "the step" if len(x) == 1 else f"all {len(x)} steps"
        ax.text(
            0.5, 0.48, f"exactly 0 in {steps}", ha="center", color=GREEN, fontsize=13, fontweight="bold",
            transform=ax.transAxes,
        )  # fmt: skip
    _legend(ax)
    return True


def _throughput(ax: Axes, history: History) -> bool:
    values: list[float] = []
    for name, color, label in (
        ("rollout/tokens_per_s", BLUE, "rollout, tokens/s"),
        ("train/tokens_per_s", ORANGE, "training, tokens/s"),
    ):
        x, y = history.series(name)
        if x:
            values += y
            _line(ax, x, y, color, label)
    if values:
        _from_zero(ax, values)
        _legend(ax)
    return bool(values)


def _from_zero(ax: Axes, values: list[float]) -> None:
    """Begin the axis at 0, where nothing lies below. Comes after all drawing: it ends the automatic range."""
    if min(values) >= 0 and ax.get_ylim()[1] > 0:
        ax.set_ylim(bottom=0)


def _right_axis(ax: Axes, color: str) -> Axes:
    right: Axes = ax.twinx()
    _style(right, right=True)
    right.tick_params(axis="y", colors=color)
    return right
