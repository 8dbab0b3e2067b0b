"""What training needs of a drafter whose layers have experts: what the routers did, auxiliary loss, bias update.

Legend: E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.drafter.moe import MoE, RoutingStats, balance_loss, update_bias

__all__ = ["RoutedTraining"]


class RoutedTraining:
    """Mixed into drafters whose layers may have experts."""

    routing: tuple[RoutingStats, ...] = ()
    """What each layer's router did in the last training pass; empty without experts."""

    def experts_of_layers(self: Any) -> list[MoE]:
        """The expert blocks in order of layers."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def auxiliary_loss(self) -> Tensor | None:
        """Weighted sum of the layers' balance losses of the last pass; None where nothing is balanced by a loss."""
        terms = [
            block.config.balance_weight * balance_loss(stats, block.config.experts_per_token or 1)
            for block, stats in zip(self.experts_of_layers(), self.routing, strict=False)
            if block.config.balancing == "loss"
        ]
        return torch.stack(terms).sum() if terms else None

    def balance(self, counts: Sequence[Tensor]) -> None:
        """After an optimizer step: move the routers' biases, given the choices [E] of each layer in the whole step."""
        for block, chosen in zip(self.experts_of_layers(), counts, strict=True):
            if block.config.balancing == "bias":
                update_bias(block.gate, chosen)
