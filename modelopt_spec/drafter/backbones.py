"""The backbones by their config name."""

from __future__ import annotations

from collections.abc import Callable

from modelopt_spec.config import DrafterConfig
from modelopt_spec.drafter.dense import DenseDrafter
from modelopt_spec.drafter.drafter import Drafter

BACKBONES: dict[str, Callable[[DrafterConfig], Drafter]] = {"dense": DenseDrafter}
