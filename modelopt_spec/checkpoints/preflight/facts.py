"""The facts on which training and serving must agree, as values that can be compared."""

from __future__ import annotations

import math
from typing import Any

from modelopt_spec.checkpoints.engines.base import confidence_input
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig

__all__ = ["DEPENDS", "FACTS", "FIELD_FACTS", "agree", "facts_of"]

FACTS: dict[str, str] = {
    "format": "layout of the files, which decides who reads which key",
    "target": "width and depth of the target",
    "taps": "tapped layers, 0-based layer outputs",
    "anchor layout": "whether slot 0 drafts",
    "block size": "slots of a block",
    "mask token": "id in the slots that are not drafted yet",
    "layer style": "kind of transformer layers",
    "shape": "layers, hidden, heads, kv heads, head width, MLP width",
    "rope base": "base of the rotary embedding",
    "rope scaling": "its scaling and the scaling's own keys",
    "rotated share": "share of each head that rotates",
    "norm epsilon": "epsilon of all RMS norms",
    "activation": "activation of the MLP",
    "attention bias": "biases in the attention's projections",
    "longest context": "positions that the rotary tables cover",
    "window": "context tokens that a slot sees",
    "window rule": "how the window is counted",
    "causality": "whether slots see later slots of their block",
    "attention sink": "a learned logit per head in the softmax",
    "embedding scale": "what the draft's input embeddings are multiplied with",
    "logit scale": "what the base logits are multiplied with",
    "logit soft-cap": "tanh cap of the base logits",
    "vocabulary": "ids that the draft knows",
    "draft vocabulary": "number of ids that the draft can say, where it is not all",
    "d2t": "table from the draft's ids to the target's",
    "head": "correction head",
    "head rank": "width of its latent",
    "head state": "width of its recurrent state",
    "pure prefix": "drafted slots that keep base logits",
    "confidence head": "whether there is one",
    "confidence input": "what it reads",
    "dtype": "type of the stored weights",
    "quantisation": "format of the quantised weights and the modules that are not",
    "weights": "the weights themselves",
    "mask row": "embedding of the mask token: in range, nobody else's, and no text holds it",
    "own modules": "embedding and output projection, where the file carries them",
    "block": "one block, computed from the files alone and by training's own pass",
}
"""Name -> meaning, in the order of the report."""

DEPENDS = {
    "window rule": ("window",),
    "head rank": ("head",),
    "head state": ("head",),
    "pure prefix": ("head",),
    "confidence input": ("head", "confidence head"),
    "d2t": ("draft vocabulary",),
}
"""Fact -> the facts without which it means nothing: where one of those differs, it is not compared."""

FIELD_FACTS: dict[str, str] = {
    "target_layer_ids": "taps",
    "layout": "anchor layout",
    "block_size": "block size",
    "mask_token_id": "mask token",
    "layer_style": "layer style",
    "key_is_value": "layer style",
    "num_attention_heads": "shape",
    "num_key_value_heads": "shape",
    "num_layers": "shape",
    "hidden_size": "shape",
    "head_dim": "shape",
    "intermediate_size": "shape",
    "hidden_act": "activation",
    "rms_norm_eps": "norm epsilon",
    "max_position_embeddings": "longest context",
    "attention_bias": "attention bias",
    "rope_theta": "rope base",
    "rope_parameters": "rope scaling",
    "rope share": "rotated share",
    "rotary style": "rope scaling",
    "attention value scale": "shape",
    "sliding_window": "window",
    "causal": "causality",
    "attention_sink": "attention sink",
    "vocab_size": "vocabulary",
    "draft_vocab_size": "draft vocabulary",
    "target_hidden_size": "target",
    "num_target_layers": "target",
    "algorithm": "format",
    "head.type": "head",
    "head.rank": "head rank",
    "head.gru_hidden_dim": "head state",
    "head.pure_draft_prefix_len": "pure prefix",
    "confidence.enabled": "confidence head",
    "confidence.with_markov": "confidence input",
}
"""Field of a drafter config that a layout was reading -> fact that it is about."""


def facts_of(config: DrafterConfig, target: TargetFacts | None = None) -> dict[str, Any]:
    """The facts that a resolved config decides; those of the target too where it is given."""
    backbone, head = config.backbone, config.head
    rope = dict(backbone.rope_parameters or {})
    base = rope.pop("rope_theta", None)
    facts: dict[str, Any] = {
        "target": (config.target_hidden_size, config.num_target_layers),
        "taps": tuple(config.target_layer_ids or ()),
        "anchor layout": str(config.layout),
        "block size": config.block_size,
        "mask token": config.mask_token_id,
        "layer style": backbone.layer_style + (", keys are values" if backbone.key_is_value else ""),
        "shape": (
            backbone.num_layers,
            backbone.hidden_size,
            backbone.num_attention_heads,
            backbone.num_key_value_heads,
            backbone.head_dim,
            backbone.intermediate_size,
        ),
        "rope base": None if base is None else float(base),
        "rotated share": float(rope.pop("partial_rotary_factor", 1.0) or 1.0),
        "rope scaling": {"rope_type": "default", **rope},
        "norm epsilon": backbone.rms_norm_eps,
        "activation": backbone.hidden_act,
        "attention bias": backbone.attention_bias,
        "longest context": backbone.max_position_embeddings,
        "window": backbone.sliding_window,
        "window rule": backbone.window_rule if backbone.sliding_window is not None else None,
        "causality": backbone.causal,
        "attention sink": backbone.attention_sink,
        "vocabulary": config.vocab_size,
        "draft vocabulary": config.draft_vocab_size,
        "d2t": "none" if config.draft_vocab_size is None else "offsets",
        "head": head.type,
        "head rank": 0 if head.type == "none" else head.rank,
        "head state": (head.gru_hidden_dim or 2 * head.rank) if head.type == "gru" else None,
        "pure prefix": head.pure_draft_prefix_len if head.type == "gru" else None,
        "confidence head": config.confidence.enabled,
        "confidence input": confidence_input(config.confidence.enabled, config.confidence.with_markov),
    }
    if target is not None and target.known:
        facts["embedding scale"] = target.embedding_scale
        facts["logit scale"] = target.logit_scale
        facts["logit soft-cap"] = target.logit_softcapping
    return facts


def agree(a: Any, b: Any) -> bool:
    """Whether two values of a fact are the same, numbers up to what JSON and float32 keep."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-6)
    if isinstance(a, dict) and isinstance(b, dict):
        return all(agree(a.get(key), b.get(key)) for key in {*a, *b})
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(agree, a, b))
    return bool(a == b)
