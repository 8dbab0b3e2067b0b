"""SGLang 0.5.23: which dense drafts it serves, and how. Checked against its parser's rules only."""

from __future__ import annotations

import torch

from modelopt_spec.checkpoints.engines.base import Engine, Serving, drafts_of, is_anchor_first
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import EMBEDDING_TAP

__all__ = ["SGLang"]


class SGLang(Engine):
    """Algorithms DSPARK (with a Markov head) and DFLASH (without, or Domino)."""

    name = "sglang"
    title = "SGLang"
    version = "0.5.23"
    evidence = "file rules checked (needs a GPU to run)"
    layouts = ("deepspec", "zlab", "domino", "nemotron")
    heads = ("none", "vanilla", "gated", "rnn", "gru")

    def refuses(self, serving: Serving) -> str | None:
        """No reduced vocabulary, no embedding tap; DSPARK needs a head; Domino in bf16."""
        reason = self.common_refusal(serving)
        config = serving.config
        if reason:
            return reason
        if EMBEDDING_TAP in (config.target_layer_ids or ()):
            return "it rejects tap -1 (the embedding output); train with target_layer_ids >= 0, or serve with vLLM"
        if config.draft_vocab_size is not None:
            return "it has no reduced vocabulary; train with draft_vocab_size null, or serve with vLLM or llama.cpp"
        if serving.layout == "deepspec" and config.head.type == "none":
            return (
                "DSPARK needs markov_rank > 0 and DFLASH reads bonus-anchor blocks. Train with layout bonus_anchor, or "
                "with a vanilla head of a small rank"
            )
        if config.confidence.enabled and config.confidence.with_markov and config.head.type == "none":
            return "its confidence head reads the Markov head's embedding"
        if config.head.type == "gru":
            if config.head.pure_draft_prefix_len != 1:
                return (
                    f"Domino serves pure_draft_prefix_len 1 only, this drafter's is {config.head.pure_draft_prefix_len}"
                )
            if serving.dtype != torch.bfloat16:
                return f"Domino runs in bfloat16 only, these weights are {serving.dtype}; pass dtype=bfloat16"
        return None

    def launch(self, config: DrafterConfig, layout: str, target: str, draft: str) -> str:
        """``sglang.launch_server`` with the algorithm and the window of draft tokens that it expects."""
        dspark = layout in ("deepspec", "nemotron") and config.head.type != "none"
        tokens = drafts_of(config) + 1 if dspark else config.block_size
        return (
            f"python -m sglang.launch_server --model-path {target} "
            f"--speculative-algorithm {'DSPARK' if dspark else 'DFLASH'} "
            f"--speculative-draft-model-path {draft} --speculative-num-draft-tokens {tokens}"
        )

    def notes(self, serving: Serving) -> list[str]:
        """Confidence scheduling needs its own switch; Domino leaves the last slot unused."""
        config = serving.config
        notes = []
        if config.confidence.enabled:
            notes.append(
                "sglang: SGLANG_RAGGED_VERIFY_MODE=compact uses the confidence head; else blocks are verified whole"
            )
        if config.head.type == "gru" and is_anchor_first(config):
            notes.append(
                f"sglang: Domino drafts {config.block_size - 1} tokens from {config.block_size} slots, greedy only"
            )
        return notes
