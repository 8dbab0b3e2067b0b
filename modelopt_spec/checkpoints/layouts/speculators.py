"""speculators 0.9's layout (``DSparkSpeculator``, ``DFlashSpeculator``), both block layouts and reduced vocabularies.

The Qwen3 keys stand inside ``transformer_layer_config``; taps are "aux" ids, one more than ours. ``d2t`` holds offsets
(target id = draft id + d2t[draft id]) and ``t2d`` marks the target ids that the draft can say.

Layers of full attention are bidirectional inside a block; those with a window are causal unless
``sliding_window_non_causal``. vLLM takes that flag for all layers, so it is written true for every bidirectional draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Draft, Layout, only_dense
from modelopt_spec.checkpoints.layouts.dense_keys import layer_ids, sink_to_file, sink_to_ours
from modelopt_spec.checkpoints.layouts.qwen3_keys import read_backbone, write_backbone
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import ConfidenceConfig, DFlashConfig, DrafterConfig, DSparkConfig, HeadConfig
from modelopt_spec.conventions import BlockLayout, aux_layer_id, first_drafting_slot, tap_from_aux_layer_id

__all__ = ["SpeculatorsLayout"]

VERSION = "0.9.0"
INNER = "transformer_layer_config."
TARGET_TO_DRAFT = "t2d"


class SpeculatorsLayout(Layout):
    """``speculators_model_type`` dspark (with or without a head) or dflash (bonus anchor, no head)."""

    name = "speculators"
    title = "speculators 0.9"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By ``speculators_model_type``."""
        return config.get("speculators_model_type") in ("dspark", "dflash")

    def refuses(self, config: DrafterConfig) -> str | None:
        """Markov heads or none, on a dense backbone whose causality follows its windows."""
        if (reason := only_dense(config)) is not None:
            return reason
        if config.head.type not in ("none", "vanilla", "gated", "rnn"):
            return f"has no {config.head.type!r} head; use layout 'domino'"
        if config.backbone.causal and config.backbone.sliding_window is None:
            return "has no causal blocks without a sliding window; use layout 'deepspec'"
        if config.backbone.attention_sink:
            return "has no attention sink; use layout 'deepspec'"
        if config.algorithm == "dflash" and config.confidence.enabled and self._is_dflash(config):
            return "has no confidence head in a DFlash draft; use layout 'deepspec'"
        return None

    @staticmethod
    def _is_dflash(config: DrafterConfig) -> bool:
        """Whether it is written as a DFlash draft; anchor-first headless drafts are DSpark ones of rank 0."""
        return (
            config.head.type == "none" and config.layout == BlockLayout.BONUS_ANCHOR and not config.confidence.enabled
        )

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Its own fields, the Qwen3 keys inside, and the proposal that says how many tokens a block drafts."""
        dflash = self._is_dflash(config)
        backbone = config.backbone
        kind = "dflash" if dflash else "dspark"
        keys: dict[str, Any] = {
            "architectures": ["DFlashSpeculator" if dflash else "DSparkSpeculator"],
            "speculators_model_type": kind,
            "speculators_version": VERSION,
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": config.block_size - first_drafting_slot(config.layout),
                    }
                ],
                "verifier": {"name_or_path": target.name, "architectures": []},
            },
            "transformer_layer_config": {
                "model_type": "qwen3",
                "vocab_size": config.vocab_size,
                **write_backbone(backbone),
            },
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "block_size": config.block_size,
            "target_hidden_size": config.target_hidden_size,
            "num_target_layers": config.num_target_layers,
            "aux_hidden_state_layer_ids": [aux_layer_id(i) for i in config.target_layer_ids or ()],
            "mask_token_id": config.mask_token_id,
            "sliding_window_non_causal": not backbone.causal,
            "sample_from_anchor": config.layout == BlockLayout.ANCHOR_FIRST,
        }
        if not dflash:
            headless = config.head.type == "none"
            keys |= {
                "markov_rank": 0 if headless else config.head.rank,
                "markov_head_type": "vanilla" if headless else config.head.type,
                "enable_confidence_head": config.confidence.enabled,
                "confidence_head_with_markov": config.confidence.enabled and config.confidence.with_markov,
            }
        return keys

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Defaults as its own config classes have them."""
        kind = keys.get("algorithm", "speculators_model_type", "speculators_config.algorithm")
        non_causal = keys.get("causal", "sliding_window_non_causal", default=False, convert=bool)
        backbone = read_backbone(keys, INNER)
        if keys.peek(f"{INNER}is_causal") is None:
            backbone = backbone.replace(causal=backbone.sliding_window is not None and not non_causal)
        anchor_first = keys.get("layout", "sample_from_anchor", default=kind == "dspark", convert=bool)
        aux = keys.get("target_layer_ids", "aux_hidden_state_layer_ids", convert=layer_ids)
        vocab = keys.get("vocab_size", f"{INNER}vocab_size", convert=int)
        draft_vocab = keys.get("draft_vocab_size", "draft_vocab_size", default=vocab, convert=int)
        fc = entries.get("fc.weight")
        width = fc.shape[-1] // max(1, len(aux)) if fc is not None and len(fc.shape) == 2 else backbone.hidden_size
        block_size = keys.get("block_size", "block_size", default=8, convert=int)
        keys.ignore("provenance", "speculators_version", "speculators_config", "has_no_defaults_at_init")
        fields: dict[str, Any] = {
            "block_size": block_size,
            "layout": BlockLayout.ANCHOR_FIRST if anchor_first else BlockLayout.BONUS_ANCHOR,
            "target_layer_ids": tuple(tap_from_aux_layer_id(i) for i in aux),
            "num_taps": len(aux),
            "mask_token_id": keys.get("mask_token_id", "mask_token_id", convert=int),
            "backbone": backbone,
            "vocab_size": vocab,
            "draft_vocab_size": None if draft_vocab == vocab else draft_vocab,
            "target_hidden_size": keys.get("target_hidden_size", "target_hidden_size", default=width, convert=int),
            "num_target_layers": keys.get("num_target_layers", "num_target_layers", default=None),
        }
        self._check_proposal(keys, block_size - first_drafting_slot(fields["layout"]))
        rank = keys.get("head.rank", "markov_rank", default=256, convert=int) if kind == "dspark" else 0
        enabled = (
            keys.get("confidence.enabled", "enable_confidence_head", default=True, convert=bool)
            if kind == "dspark"
            else False
        )
        if rank == 0:
            keys.ignore("there is no head", "markov_head_type", "confidence_head_with_markov")
            return DFlashConfig(**fields, confidence=ConfidenceConfig(enabled=enabled, with_markov=not enabled))
        head = HeadConfig(type=keys.get("head.type", "markov_head_type", default="vanilla", convert=str), rank=rank)
        with_markov = keys.get("confidence.with_markov", "confidence_head_with_markov", default=True, convert=bool)
        confidence = ConfidenceConfig(enabled=enabled, with_markov=with_markov if enabled else True)
        return DSparkConfig(**fields, head=head, confidence=confidence)

    @staticmethod
    def _check_proposal(keys: KeyReader, drafts: int) -> None:
        """The proposal's number of tokens must be what a block drafts."""
        methods = keys.peek("speculators_config.proposal_methods")
        if isinstance(methods, list) and methods and isinstance(methods[0], dict):
            written = methods[0].get("speculative_tokens")
            if written not in (None, drafts):
                message = f"{keys.where} contradicts itself: speculative_tokens {written}, but a block drafts {drafts}"
                keys.contradict("block_size", message)

    def file_name(self, ours: str) -> str:
        """Names are ours."""
        return sink_to_file(ours)

    def our_name(self, name: str) -> str:
        """Names are ours."""
        return sink_to_ours(name)

    def known_extra(self, name: str) -> str | None:
        """``t2d`` follows from ``d2t``; full-vocabulary drafts may carry empty tables."""
        if name == TARGET_TO_DRAFT:
            return "follows from d2t"
        if name == "d2t":
            return "a full vocabulary needs no table"
        return super().known_extra(name)

    def write_tensors(self, draft: Draft) -> dict[str, Tensor]:
        """With ``t2d`` where the vocabulary is reduced."""
        tensors = super().write_tensors(draft)
        if draft.config.draft_vocab_size is not None:
            said = draft.tensors["d2t"] + torch.arange(draft.config.draft_vocab_size)
            marks = torch.zeros(draft.config.vocab_size or 0, dtype=torch.bool)
            marks[said] = True
            tensors[TARGET_TO_DRAFT] = marks
        return tensors
