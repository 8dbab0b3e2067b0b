"""The drafter of a golden case: its config in this package's words, its weights, and a target of two matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.config import BackboneConfig, ConfidenceConfig, DrafterConfig, HeadConfig
from modelopt_spec.conventions import BlockLayout
from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.base import TargetShape

_DOMINO_PREFIXES = ("prefix_gru.", "embed_proj.")
_TARGET_NAMES = ("embed_tokens.weight", "lm_head.weight")


class MatrixTarget:
    """Embedding [V, D] and output projection [V, D] of a case, frozen; there are no layers to run."""

    def __init__(self, embedding: Tensor, projection: Tensor, num_layers: int = 1) -> None:
        self._embedding = embedding.detach()
        self._projection = projection.detach()
        self._shape = TargetShape(
            model_type="golden",
            hidden_size=embedding.shape[1],
            vocab_size=projection.shape[0],
            num_layers=num_layers,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=embedding.shape[1],
            intermediate_size=embedding.shape[1],
            rms_norm_eps=1e-6,
            embedding_rows=embedding.shape[0],
        )

    @property
    def shape(self) -> TargetShape:
        """Sizes."""
        return self._shape

    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Not available: a case brings its features along."""
        raise NotImplementedError("golden cases hold their target features; this target cannot be run")

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        return self._embedding[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return hidden @ self._projection.to(hidden.dtype).T

    def output_weight(self) -> Tensor:
        """[V, D]."""
        return self._projection


def case_layout(case: dict[str, Any]) -> BlockLayout:
    """Which token slot k of the case's block predicts."""
    config = case["config"]
    unshifted = config.get("shift_label") is False or "bonus" in str(config.get("layout", "")).lower()
    return BlockLayout.BONUS_ANCHOR if unshifted else BlockLayout.ANCHOR_FIRST


def case_config(case: dict[str, Any], tensors: dict[str, Tensor]) -> DrafterConfig:
    """The case's config as a complete :class:`DrafterConfig`."""
    given = case["config"]
    head_name = given.get("head", "none")
    head, algorithm = {"none": ("none", "dflash"), "domino": ("gru", "domino")}.get(head_name, (head_name, "dspark"))
    layer_ids = tuple(given["target_layer_ids"])
    has_confidence = given.get("confidence_head", True) and "confidence_head.proj.weight" in tensors
    return DrafterConfig(
        algorithm=algorithm,
        block_size=given["block_size"],
        layout=case_layout(case),
        target_layer_ids=layer_ids,
        num_taps=len(layer_ids),
        mask_token_id=given["mask_token_id"],
        vocab_size=given["vocab_size"],
        target_hidden_size=tensors["fc.weight"].shape[1] // len(layer_ids),
        num_target_layers=given.get("num_target_layers", max(layer_ids) + 1),
        backbone=BackboneConfig(
            num_layers=given["num_draft_layers"],
            hidden_size=given["hidden_size"],
            num_attention_heads=given["num_attention_heads"],
            num_key_value_heads=given["num_key_value_heads"],
            head_dim=given["head_dim"],
            intermediate_size=given["intermediate_size"],
            hidden_act=given.get("hidden_act", "silu"),
            rms_norm_eps=given["rms_norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": given["rope_theta"]},
            max_position_embeddings=given.get("max_position_embeddings", 32768),
            attention_bias=given.get("attention_bias", False),
        ),
        head=HeadConfig(
            type=head,
            rank=given.get("markov_rank") or given.get("emb_dim") or 1,
            gru_hidden_dim=given.get("gru_hidden_dim"),
            pure_draft_prefix_len=given.get("pure_draft_prefix_len", 1),
        ),
        confidence=ConfidenceConfig(
            enabled=bool(has_confidence), with_markov=bool(given.get("confidence_head_with_markov", False))
        ),
    )


def case_parameter_name(name: str) -> str:
    """The golden name of one of our parameters: Domino's tensors stand at the top level there."""
    return name.removeprefix("domino_head.")


def _our_name(name: str) -> str:
    return f"domino_head.{name}" if name.startswith(_DOMINO_PREFIXES) else name


def build_case_drafter(case: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> Drafter:
    """A drafter with the case's weights, bound to its embedding and projection, in one precision.

    Raises:
        RuntimeError: a weight is missing, left over or of another shape.
    """
    drafter = build_drafter(case_config(case, tensors)).to(dtype)
    names = [name for name in case["weights"] if name not in _TARGET_NAMES]
    drafter.load_state_dict({_our_name(name): tensors[name].to(dtype) for name in names})
    embedding = tensors["embed_tokens.weight"].to(dtype)
    projection = tensors.get("lm_head.weight", embedding).to(dtype)
    drafter.bind(MatrixTarget(embedding, projection, case["config"].get("num_target_layers", 1)))
    return drafter
