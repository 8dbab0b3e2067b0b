"""Correction heads, one file each; importing this package registers those that ship with it."""

from modelopt_spec.drafter.heads import gated, gru, rnn, vanilla
from modelopt_spec.drafter.heads.base import (
    CorrectionHead,
    HeadContext,
    build_head,
    head_class,
    head_names,
    register_head,
)

__all__ = [
    "CorrectionHead",
    "HeadContext",
    "build_head",
    "gated",
    "gru",
    "head_class",
    "head_names",
    "register_head",
    "rnn",
    "vanilla",
]
