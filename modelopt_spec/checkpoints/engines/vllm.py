"""vLLM 0.32: which dense drafts it serves, and how."""

from __future__ import annotations

import json

from modelopt_spec.checkpoints.engines.base import Engine, Serving, drafts_of, is_anchor_first
from modelopt_spec.config import DrafterConfig

__all__ = ["VLLM"]


class VLLM(Engine):
    """``qwen3_dspark`` and ``qwen3_dflash`` models of vLLM."""

    name = "vllm"
    title = "vLLM"
    version = "0.32"
    evidence = "served in tests (CPU build)"
    layouts = ("deepspec", "zlab", "speculators", "gemma4", "nemotron")
    heads = ("none", "vanilla")

    def refuses(self, serving: Serving) -> str | None:
        """Vanilla heads or none; sliding windows as the query rule counts them; no soft-capped base logits."""
        reason = self.common_refusal(serving)
        config, target = serving.config, serving.target
        if reason:
            return reason
        if serving.layout == "zlab" and is_anchor_first(config):
            return "its DFlash draft rejects sample_from_anchor; write layout 'deepspec' (markov_rank 0)"
        if target is not None and target.logit_softcapping and serving.layout != "gemma4":
            return (
                f"it does not soft-cap the logits of a Qwen3-style draft, and this target caps at "
                f"{target.logit_softcapping:g}; use layout 'gemma4', or SGLang's DFlash"
            )
        if target is not None and target.logit_scale != 1.0:
            return f"it does not scale the draft's logits, and this target scales its own by {target.logit_scale:g}"
        return None

    def launch(self, config: DrafterConfig, layout: str, target: str, draft: str) -> str:
        """``vllm serve`` with the method and the draft length spelled out."""
        method = "dflash" if self.is_dflash(config, layout) else "dspark"
        settings = {"method": method, "model": draft, "num_speculative_tokens": drafts_of(config)}
        prefix = "VLLM_USE_V2_MODEL_RUNNER=1 " if method == "dspark" else ""
        return f"{prefix}vllm serve {target} --speculative-config '{json.dumps(settings)}'"

    @staticmethod
    def is_dflash(config: DrafterConfig, layout: str) -> bool:
        """Whether the draft runs under the ``dflash`` method."""
        return layout == "zlab" or (layout == "speculators" and config.head.type == "none")

    def notes(self, serving: Serving) -> list[str]:
        """The draft length is not validated."""
        count = drafts_of(serving.config)
        return [f"vllm: num_speculative_tokens must be {count}; another value is accepted and drafts badly"]
