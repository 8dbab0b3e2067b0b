"""Recognises megatron-core models without importing megatron-core for everybody else."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def is_megatron(model: nn.Module) -> bool:
    """Whether a model is a megatron-core GPTModel (only possible if megatron-core is imported already)."""
    module = sys.modules.get("megatron.core.models.gpt")
    return module is not None and isinstance(model, module.GPTModel)


def _open(model: nn.Module) -> Any:
    from modelopt_spec.targets.megatron import MegatronTarget

    return MegatronTarget(model)


FACTORIES = [(is_megatron, _open)]
