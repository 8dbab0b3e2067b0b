"""A vanilla head of zeros for drafters without one, because some engines build a head whatever the rank.

``lm_head(h) + W2 W1[x] = lm_head(h)`` with W1 = W2 = 0: the drafter says the same. vLLM's CPU build stops with a
floating point exception at rank 0, SGLang and TensorRT-LLM refuse it.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from modelopt_spec.checkpoints.layouts.base import Draft
from modelopt_spec.config import DrafterConfig, DSparkConfig, HeadConfig
from modelopt_spec.conventions import BlockLayout

__all__ = ["RANK", "needs_zero_head", "with_zero_head"]

RANK = 16
"""Width of the head: the smallest that matrix kernels of every engine take."""


def needs_zero_head(config: DrafterConfig) -> bool:
    """Whether engines serve a drafter with a head only: no head, but blocks from slot 0 or a confidence head."""
    if config.head.type != "none" or config.backbone.type != "dense":
        return False
    return config.layout == BlockLayout.ANCHOR_FIRST or config.confidence.enabled


def with_zero_head(draft: Draft) -> Draft:
    """The same drafter with a vanilla head of zeros.

    A confidence head [1, D] gets R columns of zeros for the token's embedding, which llama.cpp always gives it.
    """
    config = draft.config
    values = {name: getattr(config, name) for name in DrafterConfig.model_fields if name != "algorithm"}
    confidence = config.confidence.replace(with_markov=True)
    headed = DSparkConfig(**{**values, "head": HeadConfig(type="vanilla", rank=RANK), "confidence": confidence})
    vocab, said = config.vocab_size or 0, config.draft_vocab_size or config.vocab_size or 0
    tensors = {
        **draft.tensors,
        "markov_head.markov_w1.weight": torch.zeros(vocab, RANK, dtype=draft.dtype),
        "markov_head.markov_w2.weight": torch.zeros(said, RANK, dtype=draft.dtype),
    }
    name = "confidence_head.proj.weight"
    if name in tensors:
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, RANK))
    return replace(draft, config=headed, tensors=tensors)
