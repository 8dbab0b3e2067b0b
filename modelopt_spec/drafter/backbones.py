"""The backbones by their config name."""

from __future__ import annotations

from collections.abc import Callable

from modelopt_spec.config import DrafterConfig
from modelopt_spec.drafter.dense import DenseDrafter
from modelopt_spec.drafter.drafter import Drafter

__all__ = ["BACKBONES"]


def _dense(config: DrafterConfig) -> Drafter:
    """Qwen3-style layers, with hyper-connections or experts where the config asks for them."""
    if config.backbone.layer_style == "gemma4":
        from modelopt_spec.drafter.gemma4 import Gemma4Drafter

        return Gemma4Drafter(config)
    if config.backbone.residual == "plain" and config.backbone.mlp == "dense":
        return DenseDrafter(config)
    from modelopt_spec.drafter.moe_dense import MixedDenseDrafter

    return MixedDenseDrafter(config)


def _moe_mhc(config: DrafterConfig) -> Drafter:
    """DeepSeek-V4 stages."""
    from modelopt_spec.drafter.moe_mhc import MoEMHCDrafter

    return MoEMHCDrafter(config)


BACKBONES: dict[str, Callable[[DrafterConfig], Drafter]] = {"dense": _dense, "moe_mhc": _moe_mhc}
