"""TensorRT-LLM (main of autumn 2026, read only): which dense drafts it serves, and how."""

from __future__ import annotations

from modelopt_spec.checkpoints.engines.base import Engine, Serving, drafts_of, is_anchor_first
from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import EMBEDDING_TAP

__all__ = ["TensorRTLLM"]


class TensorRTLLM(Engine):
    """``decoding_type`` DSpark, DFlash or, in a first version, Domino."""

    name = "tensorrt_llm"
    title = "TensorRT-LLM"
    version = "main, autumn 2026"
    evidence = "file rules checked (needs a GPU to run)"
    layouts = ("deepspec", "zlab", "domino", "speculators")
    heads = ("none", "vanilla", "gru")

    def refuses(self, serving: Serving) -> str | None:
        """Vanilla heads; the whole block is drafted; full vocabulary."""
        reason = self.common_refusal(serving)
        config = serving.config
        if reason:
            return reason
        if EMBEDDING_TAP in (config.target_layer_ids or ()):
            return "it taps decoder layers only; train with target_layer_ids >= 0, or serve with vLLM"
        if config.draft_vocab_size is not None:
            return "a reduced vocabulary is not known to work; train with draft_vocab_size null, or serve with vLLM"
        if serving.layout == "deepspec" and config.head.type == "none":
            return "its DSpark drafter needs a Markov head; train with layout bonus_anchor and serve as DFlash"
        if serving.layout == "deepspec" and not is_anchor_first(config):
            return "its DSpark drafter drafts from the anchor; train with layout anchor_first"
        return None

    def launch(self, config: DrafterConfig, layout: str, target: str, draft: str) -> str:
        """``trtllm-serve`` with the ``speculative_config`` that goes into its options file."""
        kind = {"none": "DFlash", "vanilla": "DSpark", "gru": "Domino"}[config.head.type]
        return (
            f"trtllm-serve {target} --extra_llm_api_options options.yaml   # options.yaml: speculative_config: "
            f"{{decoding_type: {kind}, speculative_model: {draft}, max_draft_len: {drafts_of(config)}}}"
        )
