"""llama.cpp (build 11434): which dense drafts it converts and serves, how it reads them, and how to start it."""

from __future__ import annotations

from collections.abc import Mapping
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
    reduced_vocabulary,
)
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig

__all__ = ["LlamaCpp"]

ROPE_TYPES = ("default", "linear", "yarn")
_OLDER = "llama.cpp: builds before 11434 do not read {}"


class LlamaCpp(Engine):
    """``convert_hf_to_gguf.py`` and ``llama-server --spec-type draft-dspark`` or ``draft-dflash``."""

    name = "llama.cpp"
    title = "llama.cpp"
    version = "build 11434"
    evidence = "served in tests"
    layouts = ("deepspec", "zlab", "speculators", "nemotron")
    heads = ("none", "vanilla")

    def serves_without_head(self, config: DrafterConfig) -> bool:
        """It reads rank 0; and a Markov head, also one of zeros, only with a confidence head beside it."""
        return not config.confidence.enabled

    def refuses(self, serving: Serving) -> str | None:
        """Vanilla heads; rope scalings that its converter writes; confidence heads that read the token."""
        reason = self.common_refusal(serving)
        config = serving.config
        if reason:
            return reason
        rope = (config.backbone.rope_parameters or {}).get("rope_type", "default")
        if rope not in ROPE_TYPES:
            return (
                f"its converter drops rope_type {rope!r} from a draft without a word; train with "
                "backbone.rope_parameters of type default, or serve with vLLM or SGLang"
            )
        if config.backbone.attention_bias:
            return "its DFlash graph has no attention bias; serve with vLLM or SGLang"
        if config.confidence.enabled and not (config.confidence.with_markov and config.head.type == "vanilla"):
            return "its confidence head always reads the Markov embedding; train with confidence.with_markov true"
        if config.head.type == "vanilla" and not config.confidence.enabled:
            return (
                "it loads a Markov head only with a confidence head beside it; train with confidence.enabled true, or "
                "export a drafter without a head for llama.cpp alone"
            )
        if serving.layout == "zlab" and is_anchor_first(config):
            return "its DFlash draft skips slot 0; write layout 'deepspec'"
        if config.draft_vocab_size is not None and serving.layout == "zlab":
            return "its DFlash converter keeps no d2t table; write layout 'deepspec'"
        if serving.layout == "speculators" and config.head.type == "none" and not is_anchor_first(config):
            return "its converter does not know DFlashSpeculator; write layout 'zlab'"
        return None

    def launch(
        self, config: DrafterConfig, layout: str, target: str, draft: str, quantization: str | None = None
    ) -> str:
        """Three lines: convert target, convert draft, serve."""
        kind = "draft-dflash" if layout == "zlab" else "draft-dspark"
        return (
            f"convert_hf_to_gguf.py {target} --outfile target.gguf && "
            f"convert_hf_to_gguf.py {draft} --target-model-dir {target} --outfile draft.gguf && "
            f"llama-server -m target.gguf -md draft.gguf --spec-type {kind} "
            f"--spec-draft-n-max {drafts_of(config)} -np 1"
        )

    def notes(self, serving: Serving) -> list[str]:
        """What older builds lack."""
        backbone, target = serving.config.backbone, serving.target
        scales = target.embedding_scale != 1.0 or target.logit_softcapping or target.logit_scale != 1.0
        wanted = (
            (backbone.causal, "causality"),
            (backbone.attention_sink, "attention sinks"),
            (scales, "the scales in dflash_config"),
            (serving.config.draft_vocab_size is not None, "d2t, and stop at a reduced vocabulary"),
        )
        return [_OLDER.format(what) for needed, what in wanted if needed]

    def reads(self, directory: Directory, target: TargetFacts) -> View:
        """As its converter (``conversion/qwen.py``) and ``src/models/dflash.cpp`` read it."""
        view, raw = View(), directory.config
        inner = raw.get("transformer_layer_config")
        keys = {**raw, **inner} if isinstance(inner, dict) else dict(raw)
        architectures = set(raw.get("architectures") or [])
        dspark = bool(architectures & {"Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"})
        if not dspark and "DFlashDraftModel" not in architectures:
            view.fails["head"] = f"its converter does not know architectures {sorted(architectures)}"
            return view
        nested = self._nested(keys, dspark)
        view.does |= qwen3_view(keys)
        scaling = view.does["rope scaling"].get("rope_type", "default")
        if scaling not in ROPE_TYPES:
            view.fails["rope scaling"] = f"its converter drops rope_type {scaling!r}"
        view.does["rotated share"] = float((keys.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0)
        taps = nested.get("target_layer_ids", keys.get("target_layer_ids"))
        view.does["taps"] = tuple(taps) if taps else None
        view.does["mask token"] = nested.get("mask_token_id")
        view.does["block size"] = nested.get("block_size", keys.get("block_size", 16))
        self._attention(keys, nested, directory, view)
        view.does["embedding scale"] = float(nested.get("input_embedding_scale", 1.0) or 1.0)
        view.does["logit scale"] = float(nested.get("output_multiplier", 1.0) or 1.0)
        view.does["logit soft-cap"] = float(nested.get("final_logit_softcapping") or 0.0) or None
        self._head(keys, directory, dspark, view)
        self._vocabulary(keys, directory, view)
        return view

    @staticmethod
    def _nested(keys: Mapping[str, Any], dspark: bool) -> dict[str, Any]:
        """``dflash_config``; a DSpark draft without one gets it from the top level."""
        nested = keys.get("dflash_config")
        if nested is not None or not dspark:
            return dict(nested or {})
        aux = keys.get("aux_hidden_state_layer_ids")
        if aux is not None:
            return {"mask_token_id": keys.get("mask_token_id"), "target_layer_ids": [i - 1 for i in aux]}
        return {key: keys[key] for key in ("target_layer_ids", "mask_token_id") if key in keys}

    @staticmethod
    def _attention(keys: Mapping[str, Any], nested: Mapping[str, Any], directory: Directory, view: View) -> None:
        swa = bool(nested.get("use_swa", False))
        window = nested.get("swa_window_size") or keys.get("sliding_window")
        types = keys.get("layer_types") or []
        sliding = swa or (keys.get("use_sliding_window", False) and "sliding_attention" in types)
        mixed = not swa and len(set(types)) > 1
        view.does["window"] = "mixed" if sliding and mixed else window if sliding and window else None
        view.does["window rule"] = "query"
        causal = keys.get("is_causal", nested.get("causal"))
        view.does["causality"] = bool(causal) if causal is not None else False
        view.does["attention sink"] = any("sink" in name for name in directory.entries)

    @staticmethod
    def _head(keys: Mapping[str, Any], directory: Directory, dspark: bool, view: View) -> None:
        markov = directory.entries.get("markov_head.markov_w1.weight")
        if dspark and (kind := keys.get("markov_head_type", "vanilla")) != "vanilla":
            view.fails["head"] = f"its converter refuses markov_head_type {kind!r}"
        view.does["head"] = "vanilla" if markov is not None else "none"
        view.does["head rank"] = markov.shape[-1] if markov is not None else 0
        speculators = "transformer_layer_config" in keys or "aux_hidden_state_layer_ids" in keys
        anchor_first = dspark and bool(keys.get("sample_from_anchor", not speculators))
        view.does["anchor layout"] = "anchor_first" if anchor_first else "bonus_anchor"
        confidence = directory.entries.get("confidence_head.proj.weight")
        view.does["confidence head"] = confidence is not None
        view.does["confidence input"] = confidence_input(confidence is not None, True)
        if confidence is not None and markov is None:
            view.fails["confidence head"] = "a confidence head without a Markov head does not load"
        if markov is not None and confidence is None:
            view.fails["confidence head"] = "a Markov head without a confidence head does not load"

    @staticmethod
    def _vocabulary(keys: Mapping[str, Any], directory: Directory, view: View) -> None:
        view.does["draft vocabulary"] = reduced_vocabulary(keys)
        reduced = view.does["draft vocabulary"] is not None
        view.does["d2t"] = "offsets" if reduced and "d2t" in directory.entries else "none"
        if reduced and "d2t" not in directory.entries:
            view.fails["d2t"] = "a reduced vocabulary needs a d2t table"
