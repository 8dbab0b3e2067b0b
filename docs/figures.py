"""The figures of the documentation, drawn from the package's own functions so that they cannot say something else.

python docs/figures.py OUT_DIR
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from modelopt_spec.conventions import (
    BlockLayout,
    default_target_layer_ids,
    first_drafting_slot,
    label_positions,
    num_draft_tokens,
    previous_positions,
)
from modelopt_spec.drafter.attention_plan import plan_blocks
from modelopt_spec.drafter.attention_reference import visible_keys
from modelopt_spec.scheduling.prefix_scheduler_reference import early_stop_reference, global_argmax_reference

BLUE, ORANGE, GREEN, GREY, INK = "#1f6fb4", "#d98c2b", "#3a8f5c", "#c3cad2", "#1d2329"
TOKENS = ["The", "cat", "sat", "on", "the", "mat", "and", "slept", "."]


def _box(axes: Axes, x: float, y: float, text: str, colour: str, *, width: float = 0.92, height: float = 0.6) -> None:
    patch = FancyBboxPatch(
        (x - width / 2, y - height / 2),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        fc=colour,
        ec=INK,
        lw=0.8,
    )
    axes.add_patch(patch)
    dark = colour in (BLUE, GREEN)
    axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, lw=0.9, color=colour, shrinkA=0, shrinkB=0)
    )


def _blank(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.set_axis_off()


def block() -> Figure:
    """One block of four slots in both layouts: what each slot embeds, and the token that it predicts."""
    figure, panels = plt.subplots(2, 1, figsize=(8.6, 5.0), layout="constrained")
    anchor, size = 4, 4
    for axes, layout in zip(panels, BlockLayout, strict=True):
        _blank(axes, (-1.6, 9.4), (-1.75, 1.5))
        for i, token in enumerate(TOKENS):
            known = i <= anchor
            _box(axes, i, 1.0, token, ORANGE if i == anchor else GREY if known else "white")
        axes.text(-0.75, 1.0, "tokens", ha="right", va="center", fontsize=8.5)
        labels = label_positions(torch.tensor(anchor), size, layout).tolist()
        first = first_drafting_slot(layout)
        for k in range(size):
            _box(axes, anchor + k, -0.3, TOKENS[anchor] if k == 0 else "mask", ORANGE if k == 0 else BLUE)
            axes.text(anchor + k, -0.83, f"slot {k}", ha="center", fontsize=8)
            if k >= first:
                _arrow(axes, (anchor + k, 0.02), (labels[k], 0.68), GREEN)
        axes.text(-0.75, -0.3, "block embeds", ha="right", va="center", fontsize=8.5)
        drafted = num_draft_tokens(layout, size)
        title = (
            f"{layout.value}: slot k predicts a + k{' + 1' if first == 0 else ''}; {size} slots draft {drafted} tokens"
        )
        axes.set_title(title, fontsize=10, loc="left")
        axes.text(anchor, 1.42, "anchor a", ha="center", fontsize=8, color=INK)
        axes.text(-0.75, -1.5, "context: target features of positions < a", fontsize=8.5, ha="left", color="#5b6672")
        axes.add_patch(Rectangle((-0.5, 0.62), anchor, 0.76, fill=False, ls="--", ec="#5b6672", lw=0.9))
    return figure


def taps() -> Figure:
    """Which layers are tapped by default, and where their outputs go."""
    layers = 12
    ids = default_target_layer_ids(layers, 3)
    figure, axes = plt.subplots(figsize=(8.6, 4.0), layout="constrained")
    _blank(axes, (-0.8, 12.2), (-0.9, layers + 0.6))
    for i in range(layers):
        _box(axes, 0.9, i + 0.4, f"layer {i}", ORANGE if i in ids else "white", width=1.9, height=0.7)
    axes.text(0.9, -0.6, "target, frozen", ha="center", fontsize=9)
    for rank, i in enumerate(ids):
        _arrow(axes, (1.9, i + 0.4), (3.45, 5.0 + rank * 0.7), ORANGE)
    _box(axes, 4.3, 5.7, "concatenate\n[.., T D]", GREY, width=1.6, height=2.6)
    _arrow(axes, (5.15, 5.7), (5.75, 5.7))
    _box(axes, 6.6, 5.7, "fc,\nhidden_norm\n[.., D]", BLUE, width=1.6, height=2.6)
    for j in range(3):
        y = 2.4 + 3.3 * j
        _box(axes, 10.2, y, f"draft layer {j}", BLUE, width=2.4, height=1.6)
        _arrow(axes, (7.45, 5.7), (8.95, y))
        if j:
            _arrow(axes, (10.2, y - 2.4), (10.2, y - 0.85), GREEN)
    axes.text(6.6, 8.2, "each draft layer projects its own\nkeys and values from it", fontsize=8.5, ha="center")
    axes.text(10.2, -0.6, "drafter, trained", ha="center", fontsize=9)
    axes.set_title(
        f"default taps of a {layers}-layer target with 3 taps: target_layer_ids = {list(ids)}", fontsize=10, loc="left"
    )
    return figure


def masks() -> Figure:
    """What each slot sees: two overlapping blocks, plain, causal and with a window."""
    anchors, size, length = torch.tensor([[6, 9]]), 4, 14
    keep = torch.ones_like(anchors, dtype=torch.bool)
    kinds: list[tuple[str, dict]] = [
        ("bidirectional block", {}),
        ("causal: true", {"causal": True}),
        ("sliding_window: 4 (rule block)", {"window": 4}),
        ("sliding_window: 4 (rule query)", {"window": 4, "window_rule": "query"}),
    ]
    figure, grid = plt.subplots(2, 2, figsize=(9.4, 4.6), layout="constrained")
    for axes, (title, options) in zip(grid.flat, kinds, strict=True):
        plan = plan_blocks(anchors, keep, block_size=size, seq_len=length, **options)
        seen = visible_keys(plan)[0].flatten(0, 1).float().numpy()
        shade = np.array(seen)
        shade[:, length:] *= 2
        axes.imshow(
            shade, cmap=matplotlib.colors.ListedColormap(["#f1f3f5", ORANGE, BLUE]), vmin=0, vmax=2, aspect="auto"
        )
        axes.set_yticks(range(2 * size), [f"block {n} slot {k}" for n in range(2) for k in range(size)], fontsize=6.5)
        ticks = [0, 6, 9, *range(length, length + 2 * size, size)]
        axes.set_xticks(ticks, ["0", "6", "9", "block 0", "block 1"], fontsize=7)
        axes.axvline(length - 0.5, color="white", lw=2)
        axes.axhline(size - 0.5, color="white", lw=2)
        axes.set_title(title, fontsize=9, loc="left")
    figure.supxlabel(
        "keys: context positions (orange), then the slots of both blocks (blue); anchors at 6 and 9", fontsize=9
    )
    return figure


def heads() -> Figure:
    """How far back each head looks inside a block."""
    names = [
        ("none", "no correction"),
        ("vanilla", "one token back"),
        ("gated", "one token back, gated by h"),
        ("rnn", "state of size R"),
        ("gru", "GRU state over embeddings"),
    ]
    figure, axes = plt.subplots(figsize=(9.0, 4.4), layout="constrained")
    _blank(axes, (-3.1, 5.0), (-0.7, 6.6))
    previous = previous_positions(torch.tensor(0), 4, BlockLayout.ANCHOR_FIRST).tolist()
    for k in range(4):
        axes.text(
            k * 1.3,
            6.1,
            f"slot {k}\nafter $x_{{a{'+' + str(previous[k]) if previous[k] else ''}}}$",
            ha="center",
            fontsize=8.5,
        )
    for row, (name, note) in enumerate(names):
        y = 5 - row * 1.2
        axes.text(-0.9, y, f"{name}\n", ha="right", va="center", fontsize=10, weight="bold")
        axes.text(-0.9, y - 0.18, note, ha="right", va="center", fontsize=8, color="#5b6672")
        for k in range(4):
            colour = GREY if name == "none" or (name == "gru" and k == 0) else BLUE
            _box(axes, k * 1.3, y, "$h_k$" if colour == GREY else "$h_k + W u_k$", colour, width=1.0, height=0.62)
            if k and name in ("vanilla", "gated", "rnn", "gru"):
                _arrow(
                    axes,
                    ((k - 1) * 1.3 + 0.5, y),
                    (k * 1.3 - 0.5, y),
                    ORANGE if name in ("vanilla", "gated") else GREEN,
                )
    axes.text(-3.0, -0.6, "orange: the token alone; green: token and state; grey: base logits", fontsize=8.5)
    return figure


def scheduler() -> Figure:
    """Two requests on a staircase of step costs: where the rule of Algorithm 1 stops, and where the optimum is."""
    survival = [[0.9, 0.8, 0.7, 0.6], [0.85, 0.5, 0.2, 0.1]]
    seconds = np.where(np.arange(0, 16) <= 4, 1.0, np.where(np.arange(0, 16) <= 8, 1.38, 2.2))

    def speed(tokens: int) -> float:
        return float(1 / seconds[tokens])

    early, best = early_stop_reference(survival, speed), global_argmax_reference(survival, speed)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.4, 3.5), layout="constrained", width_ratios=(1.15, 1))
    for row, values in enumerate(survival):
        left.plot(range(1, 5), values, marker="o", color=(BLUE, ORANGE)[row], label=f"request {row}")
        chosen = best.lengths[row]
        left.plot(
            range(1, chosen + 1),
            values[:chosen],
            marker="o",
            markersize=11,
            lw=0,
            mfc="none",
            color=(BLUE, ORANGE)[row],
        )
    left.set(xlabel="draft token", ylabel="survival (product of confidences)", xticks=range(1, 5), ylim=(0, 1))
    left.set_title("circled: verified", fontsize=9, loc="left")
    left.legend(fontsize=8)
    right.plot([s.batch_tokens for s in best.trace], [s.theta for s in best.trace], marker="o", color=INK, lw=1)
    for result, colour, name in ((early, ORANGE, "stop at the first drop"), (best, GREEN, "best of all")):
        right.plot(
            result.batch_tokens,
            result.theta,
            marker="o",
            markersize=13,
            mfc="none",
            mew=2,
            color=colour,
            lw=0,
            label=name,
        )
    right.set(xlabel="batch tokens B (step cost jumps after 4 and 8)", ylabel=r"$\Theta = \tau \cdot$ steps per second")
    right.legend(fontsize=8)
    right.grid(alpha=0.3)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "block": block,
    "taps": taps,
    "masks": masks,
    "heads": heads,
    "scheduler": scheduler,
}


def draw_all(directory: Path) -> list[Path]:
    """Write every figure as ``NAME.svg``; the files are the same from run to run."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    with plt.rc_context({"svg.hashsalt": "mtsp", "svg.fonttype": "path"}):
        for name, draw in FIGURES.items():
            figure = draw()
            figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            written.append(directory / f"{name}.svg")
    return written


if __name__ == "__main__":
    draw_all(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "generated"))
