"""Keys of a DeepSeek-V4 draft: ``dspark_*`` for the draft, and the target's own keys for the shape of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.deepseek_v4_names import stage_count
from modelopt_spec.checkpoints.layouts.dense_keys import layer_ids
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.config import (
    BackboneConfig,
    ConfidenceConfig,
    DrafterConfig,
    DSparkConfig,
    HeadConfig,
    HyperConnectionConfig,
    LatentAttentionConfig,
    MoEConfig,
)
from modelopt_spec.conventions import BlockLayout

__all__ = ["draft_keys", "read_keys", "shape_keys", "why_not", "write_keys"]

_INDEXER = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "compress_rope_theta": 160000.0}
"""Sizes of the compressed layers, which a draft has none of; converters ask for them all the same."""


def why_not(config: DrafterConfig) -> str | None:
    """Why a drafter cannot be written in this layout; None if it can."""
    backbone, moe = config.backbone, config.backbone.moe
    if backbone.type != "moe_mhc" or moe is None:
        return f"holds backbone.type moe_mhc only, not {backbone.type}; use layout 'deepspec' for a dense backbone"
    if config.head.type != "vanilla":
        return f"has no {config.head.type!r} head; train with head.type vanilla"
    if config.layout != BlockLayout.ANCHOR_FIRST:
        return "drafts from slot 0; train with layout anchor_first"
    taps = config.target_layer_ids or ()
    if len(taps) != backbone.num_layers:
        return (
            f"readers take the number of taps for that of stages: {len(taps)} taps, {backbone.num_layers} stages. "
            "Train with one tap for each stage"
        )
    checks = (
        (min(taps, default=0) < 0, "has no embedding tap; train with target_layer_ids >= 0"),
        (config.draft_vocab_size is not None, "has no reduced vocabulary; train with draft_vocab_size null"),
        (backbone.causal, "has bidirectional blocks; train with backbone.causal false"),
        (backbone.hidden_act != "silu", "has SiLU experts; train with hidden_act silu"),
        (moe.scoring != "sqrtsoftplus", f"routes by sqrt(softplus), not {moe.scoring}; train with that scoring"),
        (moe.swiglu_limit is None, "clamps its experts; train with backbone.moe.swiglu_limit"),
        (
            config.confidence.enabled and not config.confidence.with_markov,
            "has a confidence head that reads the Markov embedding; train with confidence.with_markov true",
        ),
    )
    return next((reason for wrong, reason in checks if wrong), None)


def draft_keys(config: DrafterConfig) -> dict[str, Any]:
    """What is added to a target's keys."""
    return {
        "dspark_target_layer_ids": list(config.target_layer_ids or ()),
        "dspark_markov_rank": config.head.rank,
        "dspark_noise_token_id": config.mask_token_id,
        "dspark_block_size": config.block_size,
        "n_mtp_layers": config.backbone.num_layers,
        "enable_confidence_head": config.confidence.enabled,
        "confidence_head_with_markov": config.confidence.enabled and config.confidence.with_markov,
    }


def shape_keys(config: DrafterConfig) -> dict[str, Any]:
    """What a draft's stages share with their target's layers."""
    backbone, latent = config.backbone, config.backbone.latent_attention
    moe, hyper = config.backbone.moe, config.backbone.hyper_connection
    assert latent is not None and moe is not None and hyper is not None
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": backbone.hidden_size,
        "num_attention_heads": backbone.num_attention_heads,
        "num_key_value_heads": 1,
        "head_dim": backbone.head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "q_lora_rank": latent.q_lora_rank,
        "o_groups": latent.o_groups,
        "o_lora_rank": latent.o_lora_rank,
        "sliding_window": backbone.sliding_window,
        "rope_theta": (backbone.rope_parameters or {}).get("rope_theta"),
        "rms_norm_eps": backbone.rms_norm_eps,
        "hc_mult": hyper.streams,
        "hc_sinkhorn_iters": hyper.sinkhorn_iterations,
        "hc_eps": hyper.eps,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "n_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.intermediate_size,
        "scoring_func": moe.scoring,
        "norm_topk_prob": moe.normalize_weights,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "swiglu_limit": moe.swiglu_limit,
    }


def write_keys(config: DrafterConfig) -> dict[str, Any]:
    """The ``config.json`` of a directory that holds the draft alone."""
    layers, stages = config.num_target_layers or 0, config.backbone.num_layers or 0
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **shape_keys(config),
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "num_hash_layers": 0,
        "compress_ratios": [0] * (layers + stages),
        **_INDEXER,
        "hidden_act": config.backbone.hidden_act,
        "max_position_embeddings": config.backbone.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **draft_keys(config),
    }


def read_keys(keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
    """A drafter from a target's or a draft's ``config.json``, and the tensors that are there."""
    stages = stage_count(list(entries))
    last = f"mtp.{stages - 1}."
    confidence = f"{last}confidence_head.proj.weight" in entries
    heads = keys.get("num_attention_heads", "num_attention_heads", convert=int)
    width = keys.get("hidden_size", "hidden_size", convert=int)
    taps = keys.get("target_layer_ids", "dspark_target_layer_ids", convert=layer_ids)
    backbone = BackboneConfig(
        type="moe_mhc",
        num_layers=keys.get("num_layers", "n_mtp_layers", default=stages, convert=int),
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=keys.get("head_dim", "head_dim", convert=int),
        intermediate_size=keys.get("moe.intermediate_size", "moe_intermediate_size", convert=int),
        hidden_act=keys.get("hidden_act", "hidden_act", default="silu", convert=str),
        rms_norm_eps=keys.get("rms_norm_eps", "rms_norm_eps", default=1e-6, convert=float),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": keys.get("rope_theta", "rope_theta", "rope_parameters.main.rope_theta", convert=float),
        },
        max_position_embeddings=keys.get(
            "max_position_embeddings", "max_position_embeddings", default=32768, convert=int
        ),
        sliding_window=keys.get("sliding_window", "sliding_window", default=128, convert=int),
        hyper_connection=_read_streams(keys),
        moe=_read_experts(keys),
        latent_attention=LatentAttentionConfig(
            **{
                name: keys.get(f"latent_attention.{name}", name, convert=int)
                for name in ("q_lora_rank", "qk_rope_head_dim", "o_groups", "o_lora_rank")
            }
        ),
    )
    rank = keys.get("head.rank", "dspark_markov_rank", convert=int)
    given = keys.get("confidence.enabled", "enable_confidence_head", default=confidence, convert=bool)
    keys.get("confidence.with_markov", "confidence_head_with_markov", default=True)
    return DSparkConfig(
        block_size=keys.get("block_size", "dspark_block_size", convert=int),
        layout=BlockLayout.ANCHOR_FIRST,
        target_layer_ids=taps,
        num_taps=len(taps),
        mask_token_id=keys.get("mask_token_id", "dspark_noise_token_id", convert=int),
        vocab_size=keys.get("vocab_size", "vocab_size", convert=int),
        target_hidden_size=width,
        num_target_layers=keys.get("num_target_layers", "num_hidden_layers", default=None),
        backbone=backbone,
        head=HeadConfig(type="vanilla", rank=rank),
        confidence=ConfidenceConfig(enabled=given, with_markov=True),
    )


def _read_streams(keys: KeyReader) -> HyperConnectionConfig:
    return HyperConnectionConfig(
        streams=keys.get("hyper_connection.streams", "hc_mult", default=4, convert=int),
        sinkhorn_iterations=keys.get(
            "hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters", default=20, convert=int
        ),
        eps=keys.get("hyper_connection.eps", "hc_eps", default=1e-6, convert=float),
    )


def _read_experts(keys: KeyReader) -> MoEConfig:
    """``dspark_*`` counts of a draft with fewer experts than its target come first where they are given."""

    def count(ours: str, own: str, targets: str) -> int:
        given = keys.get(ours, own, default=None)
        return int(given) if given else keys.get(ours, targets, convert=int)

    return MoEConfig(
        num_experts=count("moe.num_experts", "dspark_n_routed_experts", "n_routed_experts"),
        experts_per_token=count("moe.experts_per_token", "dspark_num_experts_per_tok", "num_experts_per_tok"),
        intermediate_size=keys.get("moe.intermediate_size", "moe_intermediate_size", convert=int),
        num_shared_experts=keys.get("moe.num_shared_experts", "n_shared_experts", default=1, convert=int),
        scoring=keys.get("moe.scoring", "scoring_func", default="sqrtsoftplus", convert=str),
        normalize_weights=keys.get("moe.normalize_weights", "norm_topk_prob", default=True, convert=bool),
        routed_scaling_factor=keys.get(
            "moe.routed_scaling_factor", "routed_scaling_factor", default=1.5, convert=float
        ),
        swiglu_limit=keys.get("moe.swiglu_limit", "swiglu_limit", default=10.0, convert=float),
    )
