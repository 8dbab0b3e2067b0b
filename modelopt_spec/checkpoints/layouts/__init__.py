"""Published draft formats, one file each; :func:`recognise` finds a directory's by its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.layouts.base import Draft, Layout, expected_shapes
from modelopt_spec.checkpoints.layouts.deepseek_v4 import DeepseekV4Layout
from modelopt_spec.checkpoints.layouts.deepspec import DeepSpecLayout
from modelopt_spec.checkpoints.layouts.deepspec_gemma4 import DeepSpecGemma4Layout
from modelopt_spec.checkpoints.layouts.domino import DominoLayout
from modelopt_spec.checkpoints.layouts.modelopt import ModelOptLayout
from modelopt_spec.checkpoints.layouts.modelopt_training import ModelOptTrainingLayout
from modelopt_spec.checkpoints.layouts.nemotron import NemotronLayout
from modelopt_spec.checkpoints.layouts.specforge import SpecForgeDominoLayout, SpecForgeDSparkLayout
from modelopt_spec.checkpoints.layouts.speculators import SpeculatorsLayout
from modelopt_spec.checkpoints.layouts.zlab import ZLabLayout
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import BlockLayout
from modelopt_spec.errors import CheckpointError, UnsupportedError, nearest

__all__ = ["LAYOUTS", "Draft", "Layout", "default_layout", "expected_shapes", "get_layout", "recognise"]

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        DeepseekV4Layout(),
        ModelOptTrainingLayout(),
        SpeculatorsLayout(),
        SpecForgeDSparkLayout(),
        SpecForgeDominoLayout(),
        NemotronLayout(),
        DeepSpecGemma4Layout(),
        DeepSpecLayout(),
        DominoLayout(),
        ModelOptLayout(),
        ZLabLayout(),
    )
}
"""All layouts by name; the first that recognises a directory wins."""


def get_layout(name: str) -> Layout:
    """A layout by name."""
    if name not in LAYOUTS:
        raise UnsupportedError(f"layout {name!r} is unknown.{nearest(name, LAYOUTS)} Known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def recognise(config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> Layout:
    """The layout of a directory, from its config and its tensors' names and shapes."""
    for layout in LAYOUTS.values():
        if layout.recognises(config, entries):
            return layout
    raise CheckpointError(
        f"no known layout has architectures {config.get('architectures')}, model_type {config.get('model_type')!r} and "
        f"tensors like {', '.join(sorted(entries)[:4])}. Known layouts: {', '.join(LAYOUTS)}; name one with layout="
    )


def default_layout(config: DrafterConfig) -> Layout:
    """The layout that most engines read for a drafter of this kind."""
    if config.backbone.type == "moe_mhc":
        return LAYOUTS["deepseek_v4"]
    if config.backbone.layer_style == "gemma4":
        return LAYOUTS["deepspec_gemma4"]
    if config.head.type == "gru":
        return LAYOUTS["domino"]
    headless = config.head.type == "none" and not config.confidence.enabled
    if headless and config.layout == BlockLayout.BONUS_ANCHOR:
        return LAYOUTS["zlab"]
    return LAYOUTS["deepspec"]
