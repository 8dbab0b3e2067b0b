"""TensorRT-LLM (main of autumn 2026, read only): which dense drafts it serves, and how it reads them."""

from __future__ import annotations

from typing import Any

from modelopt_spec.checkpoints.engines.base import (
    Directory,
    Engine,
    Serving,
    View,
    confidence_input,
    drafts_of,
    is_anchor_first,
    qwen3_view,
)
from modelopt_spec.checkpoints.target_facts import TargetFacts
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
    quantisations = ("FP8", "NVFP4", "W8A16")

    def refuses(self, serving: Serving) -> str | None:
        """Vanilla heads; the whole block is drafted; full vocabulary; a target that scales nothing."""
        reason = self.common_refusal(serving)
        config, target = serving.config, serving.target
        if reason:
            return reason
        if EMBEDDING_TAP in (config.target_layer_ids or ()):
            return "it taps decoder layers only; train with target_layer_ids >= 0, or serve with vLLM"
        if config.draft_vocab_size is not None:
            return "a reduced vocabulary is not known to work; train with draft_vocab_size null, or serve with vLLM"
        if config.head.type == "none" and (is_anchor_first(config) or serving.layout == "deepspec"):
            return "its DSpark drafter needs a Markov head; export without naming a layout writes a head of zeros"
        if config.head.type == "vanilla" and not is_anchor_first(config):
            return "its DSpark drafter drafts from the anchor; train with layout anchor_first"
        if config.backbone.attention_sink:
            return "attention sinks are not known to work; serve with vLLM or SGLang"
        if target.embedding_scale != 1.0 or target.logit_softcapping or target.logit_scale != 1.0:
            return "it is not known to scale or cap a draft as this target does; serve with llama.cpp"
        return None

    def launch(
        self, config: DrafterConfig, layout: str, target: str, draft: str, quantization: str | None = None
    ) -> str:
        """``trtllm-serve`` with the ``speculative_config`` that goes into its options file."""
        kind = {"none": "DFlash", "vanilla": "DSpark", "gru": "Domino"}[config.head.type]
        return (
            f"trtllm-serve {target} --extra_llm_api_options options.yaml   # options.yaml: speculative_config: "
            f"{{decoding_type: {kind}, speculative_model: {draft}, max_draft_len: {drafts_of(config)}}}"
        )

    def reads(self, directory: Directory, target: TargetFacts) -> View:
        """Draft keys from ``dspark_config``, ``dflash_config``, ``dspark_<key>``, then ``<key>``."""
        view, raw = View(), directory.config
        inner = raw.get("transformer_layer_config")
        keys = {**raw, **inner} if isinstance(inner, dict) else dict(raw)

        def get(key: str, default: Any = None) -> Any:
            for place in (keys.get("dspark_config") or {}, keys.get("dflash_config") or {}):
                if key in place:
                    return place[key]
            return keys.get(f"dspark_{key}", keys.get(key, default))

        view.does |= qwen3_view(keys)
        aux = raw.get("aux_hidden_state_layer_ids")
        taps = [i - 1 for i in aux] if aux is not None else get("target_layer_ids")
        view.does["taps"] = tuple(taps) if taps is not None else None
        view.does["mask token"], view.does["block size"] = get("mask_token_id"), get("block_size")
        shifted = get("shift_label", get("sample_from_anchor", True))
        view.does["anchor layout"] = "anchor_first" if shifted else "bonus_anchor"
        rank = int(get("markov_rank", 0) or 0)
        domino = get("projector_type") == "domino"
        view.does["head"] = "gru" if domino else "vanilla" if rank else "none"
        view.does["head rank"] = get("emb_dim") if domino else rank
        if rank and get("markov_head_type", "vanilla") != "vanilla":
            view.fails["head"] = f"it has no {get('markov_head_type')} head"
        if view.does["head"] == "none" and shifted and "shift_label" not in (keys.get("dflash_config") or {}):
            view.does["anchor layout"] = "bonus_anchor"
        present = any(name.startswith("confidence_head.") for name in directory.entries)
        view.does["confidence head"] = present
        view.does["confidence input"] = confidence_input(present, bool(get("confidence_head_with_markov", rank > 0)))
        view.does["draft vocabulary"], view.does["d2t"] = None, "none"
        view.does["embedding scale"], view.does["logit scale"], view.does["logit soft-cap"] = 1.0, 1.0, None
        return view
