"""What stands in place of layers that run on a server: it refuses to run, but lets a check of the ends pass through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from modelopt_spec.errors import UnsupportedError

__all__ = ["Elsewhere", "passing"]


class Elsewhere(nn.Module):
    """A layer that was left out."""

    passes = False

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """The input as it came, inside of :func:`passing` only."""
        if not self.passes:
            raise UnsupportedError(
                "this target was loaded without its layers (training.features: remote), so it cannot compute here: "
                "load it whole to evaluate or to generate"
            )
        return hidden_states


@contextlib.contextmanager
def passing(decoder: nn.Module) -> Iterator[None]:
    """Let hidden states pass through layers that are elsewhere: the model is then its two ends."""
    layers = [module for module in decoder.modules() if isinstance(module, Elsewhere)]
    for layer in layers:
        layer.passes = True
    try:
        yield
    finally:
        for layer in layers:
            layer.passes = False
