"""vLLM 0.32: which dense drafts it serves, how it reads them, and how to start it."""

from __future__ import annotations

import json
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

__all__ = ["VLLM"]

_SLIDING = "sliding_attention"


class VLLM(Engine):
    """``qwen3_dspark`` and ``qwen3_dflash`` models of vLLM."""

    name = "vllm"
    title = "vLLM"
    version = "0.32"
    evidence = "served in tests (CPU build)"
    layouts = ("deepspec", "zlab", "speculators", "nemotron")
    heads = ("none", "vanilla")
    quantisations = ("FP8", "NVFP4")

    def refuses(self, serving: Serving) -> str | None:
        """Vanilla heads or none; the target's plain embedding rows and logits."""
        reason = self.common_refusal(serving)
        config, target = serving.config, serving.target
        if reason:
            return reason
        if config.head.type == "none" and is_anchor_first(config):
            return (
                "its CPU build dies of markov_rank 0, and its DFlash draft rejects sample_from_anchor; export without "
                "naming a layout writes a head of zeros"
            )
        if config.head.type == "none" and not self.is_dflash(config, serving.layout):
            return "its CPU build dies of markov_rank 0; write layout 'zlab' or 'speculators'"
        if serving.layout == "zlab" and config.confidence.enabled:
            return "its DFlash draft has no confidence head; write layout 'deepspec'"
        if target.embedding_scale != 1.0:
            return (
                f"it gives a Qwen3-style draft the target's raw embedding rows, and training scaled them by "
                f"{target.embedding_scale:.4g}; serve with llama.cpp, which reads input_embedding_scale"
            )
        if target.logit_softcapping and config.head.type != "none":
            return (
                f"it adds the head to logits without the target's soft-cap of {target.logit_softcapping:g}; serve with "
                "llama.cpp, or train without a head"
            )
        if target.logit_scale != 1.0 and config.head.type != "none":
            return f"it does not scale the draft's logits by {target.logit_scale:g}; serve with llama.cpp"
        return None

    def launch(
        self, config: DrafterConfig, layout: str, target: str, draft: str, quantization: str | None = None
    ) -> str:
        """``vllm serve`` with the method and the draft length spelled out."""
        dflash = self.is_dflash(config, layout)
        settings = {
            "method": "dflash" if dflash else "dspark",
            "model": draft,
            "num_speculative_tokens": drafts_of(config),
        }
        prefix = "" if dflash else "VLLM_USE_V2_MODEL_RUNNER=1 "
        return f"{prefix}vllm serve {target} --speculative-config '{json.dumps(settings)}'"

    @staticmethod
    def is_dflash(config: DrafterConfig, layout: str) -> bool:
        """Whether it runs under the ``dflash`` method."""
        headless = config.head.type == "none" and not config.confidence.enabled
        return layout == "zlab" or (layout == "speculators" and headless and not is_anchor_first(config))

    def notes(self, serving: Serving) -> list[str]:
        """The draft length is not validated."""
        count = drafts_of(serving.config)
        notes = [f"vllm: num_speculative_tokens must be {count}; another value is accepted and drafts badly"]
        if serving.target.logit_softcapping:
            notes.append("vllm: drafts are made from logits without the soft-cap; the greedy choice is the same")
        return notes

    def reads(self, directory: Directory, target: TargetFacts) -> View:
        """As ``config/speculative.py``, ``qwen3_dspark.py`` and ``qwen3_dflash.py`` read it."""
        view = View()
        keys = self._translated(directory.config, view)
        architectures = keys.get("architectures") or []
        dspark = bool({"Qwen3DSparkModel", "DSparkDraftModel"} & set(architectures))
        if not dspark and "DFlashDraftModel" not in architectures:
            view.fails["head"] = f"architectures {architectures} is no dense draft of its"
            return view
        nested = keys.get("dflash_config") or {}
        view.does |= qwen3_view(keys)
        view.does["taps"] = self._taps(keys, nested)
        view.does["mask token"] = nested.get("mask_token_id", keys.get("mask_token_id"))
        view.does["window"] = self._window(keys, nested)
        view.does["causality"] = self._causal(keys, nested)
        view.does["window rule"] = "query"
        view.does["attention sink"] = bool(
            nested.get("attention_sink_bias", keys.get("add_swa_attention_sink_bias", False))
        )
        view.does["logit scale"] = float(keys.get("logit_scale", 1.0))
        view.does["logit soft-cap"] = None
        view.does["embedding scale"] = 1.0
        if not keys.get("markov_rank"):
            view.harmless |= dict.fromkeys(("logit soft-cap", "logit scale"), "the greedy choice is the same")
        view.does["draft vocabulary"] = reduced_vocabulary(keys)
        if dspark:
            self._dspark(keys, directory, view)
        else:
            self._dflash(view)
        if nested.get("sample_from_anchor", False):
            view.fails["anchor layout"] = "it rejects sample_from_anchor inside dflash_config, for DSpark drafts too"
        self._vocabulary(directory, view)
        return view

    @staticmethod
    def _translated(config: Mapping[str, Any], view: View) -> dict[str, Any]:
        """A speculators config as vLLM turns it into one of its own; anything else as it is."""
        kind = config.get("speculators_model_type")
        if kind is None:
            return dict(config)
        keys = dict(config.get("transformer_layer_config") or {})
        aux = config.get("aux_hidden_state_layer_ids")
        if aux is None:
            view.fails["taps"] = "aux_hidden_state_layer_ids is missing"
        keys["eagle_aux_hidden_state_layer_ids"] = aux
        if kind == "dflash":
            keys["architectures"] = ["DFlashDraftModel"]
            keys["draft_vocab_size"] = config.get("draft_vocab_size")
            keys["block_size"] = config.get("block_size")
            keys["dflash_config"] = {
                "mask_token_id": config.get("mask_token_id"),
                "sample_from_anchor": config.get("sample_from_anchor", False),
                "causal": not config.get("sliding_window_non_causal", True),
            }
            return keys
        keys["architectures"] = ["Qwen3DSparkModel"]
        keys["sample_from_anchor"] = config.get("sample_from_anchor", False)
        for key in (
            "draft_vocab_size",
            "target_hidden_size",
            "mask_token_id",
            "markov_rank",
            "markov_head_type",
            "block_size",
            "enable_confidence_head",
            "confidence_head_with_markov",
        ):
            if config.get(key) is not None:
                keys[key] = config[key]
        return keys

    @staticmethod
    def _taps(keys: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Aux ids (one more than layer outputs) from the first place that has any, as our ids."""
        aux = keys.get("eagle_aux_hidden_state_layer_ids")
        if aux:
            return tuple(i - 1 for i in aux)
        for ids in (nested.get("target_layer_ids"), keys.get("dspark_target_layer_ids"), keys.get("target_layer_ids")):
            if ids:
                return tuple(ids)
        return None

    @staticmethod
    def _window(keys: Mapping[str, Any], nested: Mapping[str, Any]) -> int | str | None:
        types = keys.get("layer_types")
        sliding = sum(kind == _SLIDING for kind in types or ())
        if types is not None and 0 < sliding < len(types):
            return "mixed"
        if not (sliding or nested.get("use_swa", False)):
            return None
        held = keys.get("sliding_window") if keys.get("use_sliding_window", False) else None
        return nested.get("swa_window_size", held)

    @staticmethod
    def _causal(keys: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
        for value in (keys.get("is_causal"), nested.get("causal")):
            if value is not None:
                return bool(value)
        return _SLIDING in (keys.get("layer_types") or [])

    @staticmethod
    def _dspark(keys: Mapping[str, Any], directory: Directory, view: View) -> None:
        """Head keys at the top level only; the head's type is not read."""
        rank = keys.get("markov_rank")
        if rank is None:
            view.fails["head rank"] = "markov_rank must stand at the top level"
        names = {name.rsplit(".", 2)[0] for name in directory.entries}
        for part, kind in (("gate_proj", "gated"), ("joint_proj", "rnn")):
            if any(part in name for name in directory.entries if "mlp" not in name):
                view.fails["head"] = f"it has no place for the {kind} head's tensors"
        if any(name in ("markov_w1", "markov_w2") for name in names):
            view.fails["head"] = "head tensors must be called markov_head.*"
        view.does["head"] = "vanilla" if rank else "none"
        if rank == 0:
            view.fails["head rank"] = "its CPU build dies of markov_rank 0"
        view.does["head rank"] = rank or 0
        view.does["anchor layout"] = "anchor_first" if keys.get("sample_from_anchor", True) else "bonus_anchor"
        view.does["block size"] = keys.get("block_size", keys.get("dspark_block_size"))
        enabled = bool(keys.get("enable_confidence_head", False))
        present = any(name.startswith("confidence_head.") for name in directory.entries)
        view.does["confidence head"] = enabled and present
        view.does["confidence input"] = confidence_input(enabled, bool(keys.get("confidence_head_with_markov", False)))

    @staticmethod
    def _dflash(view: View) -> None:
        """No head; the draft length comes from the command line alone."""
        view.does["head"], view.does["head rank"] = "none", 0
        view.does["confidence head"], view.does["confidence input"] = False, "none"
        view.does["anchor layout"] = "bonus_anchor"

    @staticmethod
    def _vocabulary(directory: Directory, view: View) -> None:
        reduced = view.does["draft vocabulary"] is not None
        view.does["d2t"] = "offsets" if reduced and "d2t" in directory.entries else "none"
        if reduced and "lm_head.weight" not in directory.entries:
            view.fails["draft vocabulary"] = "a reduced vocabulary needs its own lm_head.weight"
        elif reduced and "d2t" not in directory.entries:
            view.fails["d2t"] = "a reduced vocabulary needs a d2t table"
