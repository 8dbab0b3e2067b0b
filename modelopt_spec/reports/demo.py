"""The figure of `make demo`: training curve, acceptance per slot, and the engine's speed with and without the draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

__all__ = ["draw_demo"]


def draw_demo(summary: dict[str, Any], path: str | Path) -> Path:
    """Draw a demo's ``summary.json`` content; panels whose numbers are missing are left out.

    Args:
        summary: keys ``train`` (a training report), ``evaluate`` (an evaluation) and, optionally, ``llama.cpp``
            ({K: {tokens_per_second, tau}}). path: PNG file to write.
    """
    engine = summary.get("llama.cpp", {})
    figure, axes = plt.subplots(1, 3 if engine else 2, figsize=(11 if engine else 7.5, 3.2), layout="constrained")
    curve = [entry for entry in summary["train"]["curves"] if "tau" in entry]
    axes[0].plot([entry["step"] for entry in curve], [entry["tau"] for entry in curve])
    axes[0].set(xlabel="optimizer step", ylabel="accepted length (training rows)", title="training")
    acceptance = summary["evaluate"]["results"][0]["pooled"]["conditional_acceptance"]
    axes[1].bar(range(len(acceptance)), [share or 0.0 for share in acceptance])
    axes[1].set(xlabel="slot", ylabel="conditional acceptance", title="held-out prompts, real rounds", ylim=(0, 1))
    if engine:
        names = ["no draft", *(f"K = {entry['num_draft_tokens']}" for entry in engine["drafts"])]
        speeds = [engine["plain_tokens_per_s"], *(entry["tokens_per_s"] for entry in engine["drafts"])]
        axes[2].bar(names, speeds)
        axes[2].set(ylabel="tokens/s", title="llama.cpp")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return Path(path)
