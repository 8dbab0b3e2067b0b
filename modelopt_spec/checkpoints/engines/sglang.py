"""SGLang 0.5.23: which dense drafts it serves, how it reads them, and how to start it (not run here)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from modelopt_spec.checkpoints.engines.base import (
    Directory,
    Engine,
    Serving,
    View,
    confidence_input,
    drafts_of,
    is_anchor_first,
    qwen3_view,
    reduced_vocabulary,
)
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import EMBEDDING_TAP

__all__ = ["SGLang"]

_SLIDING = "sliding_attention"


class SGLang(Engine):
    """Algorithms DSPARK (with a Markov head) and DFLASH (without, or Domino)."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    evidence = "file rules checked (needs a GPU to run)"
    layouts = ("deepspec", "zlab", "domino", "nemotron")
    heads = ("none", "vanilla", "gated", "rnn", "gru")
    quantisations = ("FP8", "NVFP4")

    def refuses(self, serving: Serving) -> str | None:
        """No reduced vocabulary, no embedding tap; DSPARK needs a head; Domino in bf16."""
        reason = self.common_refusal(serving)
        config, target = serving.config, serving.target
        if reason:
            return reason
        if EMBEDDING_TAP in (config.target_layer_ids or ()):
            return "it rejects tap -1 (the embedding output); train with target_layer_ids >= 0, or serve with vLLM"
        if config.draft_vocab_size is not None:
            return "it has no reduced vocabulary; train with draft_vocab_size null, or serve with vLLM or llama.cpp"
        if serving.layout in ("deepspec", "nemotron") and config.head.type == "none":
            return (
                "DSPARK needs markov_rank > 0 and DFLASH reads bonus-anchor blocks; export without naming a "
                "layout writes a head of zeros"
            )
        if target.embedding_multiplier != 1.0:
            return (
                f"it gives the draft the target's embedding without the multiplier {target.embedding_multiplier:.4g}; "
                "serve with llama.cpp, which reads input_embedding_scale"
            )
        if config.head.type in ("vanilla", "gated", "rnn") and (target.logit_softcapping or target.logit_scale != 1.0):
            return "DSPARK neither caps nor scales the draft's logits as this target does; serve with llama.cpp"
        if config.head.type == "gru":
            if config.head.pure_draft_prefix_len != 1:
                return (
                    f"Domino serves pure_draft_prefix_len 1 only, this drafter's is {config.head.pure_draft_prefix_len}"
                )
            if serving.dtype != self.only_dtype(config):
                return f"Domino runs in bfloat16 only, these weights are {serving.dtype}; pass dtype=bfloat16"
        return None

    def only_dtype(self, config: DrafterConfig) -> torch.dtype | None:
        """Domino runs in bfloat16 alone."""
        return torch.bfloat16 if config.head.type == "gru" else None

    def launch(
        self, config: DrafterConfig, layout: str, target: str, draft: str, quantization: str | None = None
    ) -> str:
        """``sglang.launch_server`` with the algorithm and the window of draft tokens that it expects."""
        dspark = layout in ("deepspec", "nemotron")
        line = (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {'DSPARK' if dspark else 'DFLASH'} --speculative-draft-model-path {draft} "
            f"--speculative-num-draft-tokens {drafts_of(config) + 1 if dspark else config.block_size}"
        )
        if dspark and not is_anchor_first(config):
            line += f" --speculative-dspark-block-size {drafts_of(config)}"
        if quantization is not None:
            kind = {"FP8": "modelopt_fp8", "NVFP4": "modelopt_fp4"}[quantization]
            line += f" --speculative-draft-model-quantization {kind}"
        return line

    def notes(self, serving: Serving) -> list[str]:
        """Confidence scheduling needs its own switch; Domino leaves the last slot unused."""
        config = serving.config
        notes = []
        if config.confidence.enabled:
            notes.append("sglang: SGLANG_RAGGED_VERIFY_MODE=compact uses the confidence head; else whole blocks")
        if config.head.type == "gru" and is_anchor_first(config):
            notes.append(
                f"sglang: Domino drafts {config.block_size - 1} tokens from {config.block_size} slots, greedy only"
            )
        return notes

    def reads(self, directory: Directory, target: TargetFacts) -> View:
        """As ``dflash_utils.py``, ``dspark_config.py``, ``models/dflash.py`` and ``models/dspark.py`` read it."""
        view, keys = View(), directory.config
        architectures = set(keys.get("architectures") or [])
        dspark = bool(architectures & {"Qwen3DSparkModel", "DSparkDraftModel"})
        if not dspark and "DFlashDraftModel" not in architectures:
            view.fails["head"] = f"architectures {sorted(architectures)} is no dense draft of its"
            return view
        nested: Mapping[str, Any] = keys.get("dflash_config") or {}
        view.does |= qwen3_view(keys)
        view.does["rotated share"] = float(keys.get("partial_rotary_factor", 1.0) or 1.0)
        taps = nested.get("target_layer_ids", keys.get("target_layer_ids"))
        view.does["taps"] = tuple(taps) if taps is not None else None
        if taps is not None and min(taps, default=0) < 0:
            view.fails["taps"] = "it rejects the embedding tap -1"
        view.does["mask token"] = nested.get("mask_token_id", keys.get("mask_token_id"))
        view.does["block size"] = nested.get("block_size", keys.get("block_size"))
        self._attention(keys, nested, view)
        view.does["embedding scale"] = target.embedding_scale / target.embedding_multiplier
        view.does["draft vocabulary"], view.does["d2t"] = None, "none"
        if reduced_vocabulary(keys) is not None:
            view.fails["draft vocabulary"] = "it has no reduced vocabulary"
        if dspark:
            self._dspark(keys, nested, directory, view)
        else:
            self._dflash(keys, nested, view)
        return view

    @staticmethod
    def _attention(keys: Mapping[str, Any], nested: Mapping[str, Any], view: View) -> None:
        """``use_swa`` and ``dflash_config.causal`` are not read."""
        types = keys.get("layer_types") or []
        sliding = _SLIDING in types
        window = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
        if sliding and window is None:
            view.fails["window"] = (
                "sliding_attention layers need use_sliding_window and sliding_window at the top level"
            )
        view.does["window"] = "mixed" if sliding and set(types) != {_SLIDING} else window if sliding else None
        view.does["window rule"] = "query"
        causal = keys.get("is_causal")
        view.does["causality"] = sliding if causal is None else bool(causal)
        view.does["attention sink"] = bool(nested.get("attention_sink_bias", False))

    @staticmethod
    def _dspark(keys: Mapping[str, Any], nested: Mapping[str, Any], directory: Directory, view: View) -> None:
        """The parser accepts nested head keys, the head's builder reads the top level only."""
        rank = int(keys.get("markov_rank") or 0)
        if rank == 0:
            view.fails["head rank"] = "the head is built from a top-level markov_rank > 0"
        kind = str(nested.get("markov_head_type", keys.get("markov_head_type", ""))).lower()
        built = str(keys.get("markov_head_type", "vanilla")).lower()
        if kind not in ("vanilla", "gated", "rnn"):
            view.fails["head"] = f"markov_head_type {kind or None!r} is unknown to it"
        view.does["head"], view.does["head rank"] = built, rank
        view.does["anchor layout"] = "anchor_first" if keys.get("sample_from_anchor", True) else "bonus_anchor"
        present = any(name.startswith("confidence_head.") for name in directory.entries)
        with_markov = bool(keys.get("confidence_head_with_markov", rank > 0))
        view.does["confidence head"] = present
        view.does["confidence input"] = confidence_input(present, with_markov)
        view.does["logit soft-cap"], view.does["logit scale"] = None, 1.0

    @staticmethod
    def _dflash(keys: Mapping[str, Any], nested: Mapping[str, Any], view: View) -> None:
        """Bonus-anchor DFlash, or Domino by ``projector_type``; other head tensors are dropped in silence."""
        domino = nested.get("projector_type", keys.get("projector_type")) == "domino"
        view.does["confidence head"], view.does["confidence input"] = False, "none"
        cap = float(nested.get("final_logit_softcapping") or 0.0)
        view.does["logit soft-cap"] = cap or None
        view.does["logit scale"] = float(nested.get("output_multiplier", 1.0))
        if not domino:
            view.does["head"], view.does["head rank"], view.does["anchor layout"] = "none", 0, "bonus_anchor"
            return

        def get(key: str) -> Any:
            return nested.get(key, keys.get(key))

        view.does["head"], view.does["head rank"] = "gru", get("emb_dim")
        view.does["head state"], view.does["pure prefix"] = get("gru_hidden_dim"), get("pure_draft_prefix_len")
        view.does["anchor layout"] = "anchor_first" if get("shift_label") else "bonus_anchor"
        if not isinstance(get("shift_label"), bool):
            view.fails["anchor layout"] = "Domino requires shift_label"
        if get("pure_draft_prefix_len") != 1:
            view.fails["pure prefix"] = "Domino requires pure_draft_prefix_len 1"
        if nested.get("emb_dim", keys.get("emb_dim")) != keys.get("emb_dim", nested.get("emb_dim")):
            view.fails["head rank"] = "emb_dim differs between dflash_config and the top level"
