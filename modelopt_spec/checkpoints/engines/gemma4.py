"""How vLLM reads a DSpark draft with Gemma-4 layers (layout ``deepspec_gemma4``), and why the other engines do not.

By vLLM 0.32's ``models/gemma4_dspark.py``; not served here, because its layers have no CPU path.
"""

from __future__ import annotations

import math

from transformers import Gemma4TextConfig

from modelopt_spec.checkpoints.engines.base import Directory, Serving, View, confidence_input

__all__ = ["LAYOUT", "holds_draft", "notes", "reads", "refuses"]

LAYOUT = "deepspec_gemma4"


def holds_draft(directory: Directory) -> bool:
    """Whether a directory is such a draft."""
    return "Gemma4DSparkModel" in (directory.config.get("architectures") or [])


def refuses(engine: str, serving: Serving) -> str | None:
    """vLLM serves vanilla heads on layers whose keys are values, for targets that scale embeddings as Gemma does."""
    config, target = serving.config, serving.target
    if engine != "vllm":
        return "it is not known to serve Gemma-4 layers; serve with vLLM, or train with backbone.layer_style qwen3"
    if serving.layout != LAYOUT:
        return f"it reads Gemma-4 layers in layout {LAYOUT!r} only"
    if serving.quantization is not None:
        return "it ignores the quantization_config of such a draft's heads; export it whole"
    if config.head.type == "none":
        return "it builds a Markov head whatever markov_rank says; export without naming a layout"
    if config.head.type != "vanilla":
        return f"it has no {config.head.type!r} head. Distill it into a vanilla head (mtsp distill)"
    if not config.backbone.key_is_value:
        return "it projects the context for layers whose keys are values only; train with backbone.key_is_value true"
    wanted = math.sqrt(config.backbone.hidden_size or 1)
    if target.known and not math.isclose(target.embedding_scale, wanted, rel_tol=1e-2):
        return (
            f"it multiplies the draft's embeddings by {wanted:.4g}, and this target's are scaled by "
            f"{target.embedding_scale:.4g}; train with backbone.layer_style qwen3"
        )
    if target.logit_scale != 1.0:
        return f"it does not scale the draft's logits by {target.logit_scale:g}"
    return None


def notes(serving: Serving) -> list[str]:
    """Its logits processor caps whatever goes through it."""
    if not serving.target.logit_softcapping:
        return []
    return ["vllm: it soft-caps the head's contribution as well, which moves logits where that is large"]


def reads(engine: str, directory: Directory) -> View:
    """As ``gemma4_dspark.py`` reads it."""
    view, keys = View(), directory.config
    if engine != "vllm":
        view.fails["format"] = "it is not known to serve Gemma4DSparkModel"
        return view
    hf = Gemma4TextConfig(**{k: v for k, v in keys.items() if k not in ("architectures", "model_type")})
    full = dict((hf.rope_parameters or {}).get("full_attention") or {})
    shared = bool(hf.attention_k_eq_v)
    kv_heads = hf.num_global_key_value_heads if shared else hf.num_key_value_heads
    sizes = (hf.num_hidden_layers, hf.hidden_size, hf.num_attention_heads, kv_heads, hf.global_head_dim)
    view.does["layer style"] = "gemma4" + (", keys are values" if shared else "")
    view.does["shape"] = (*sizes, hf.intermediate_size)
    view.does["rope base"] = float(full.pop("rope_theta"))
    view.does["rotated share"] = float(full.pop("partial_rotary_factor", 1.0) or 1.0)
    view.does["rope scaling"] = full
    view.does["norm epsilon"], view.does["activation"] = float(hf.rms_norm_eps), hf.hidden_activation
    view.does["attention bias"], view.does["longest context"] = bool(hf.attention_bias), hf.max_position_embeddings
    view.does["causality"], view.does["window"], view.does["window rule"] = bool(keys.get("is_causal")), None, "query"
    taps = keys.get("dspark_target_layer_ids") or keys.get("target_layer_ids")
    view.does["taps"] = tuple(taps) if taps else None
    view.does["mask token"], view.does["block size"] = keys.get("mask_token_id"), keys.get("block_size")
    view.does["anchor layout"], view.does["attention sink"] = "anchor_first", False
    view.does["vocabulary"], view.does["draft vocabulary"], view.does["d2t"] = keys.get("vocab_size"), None, "none"
    view.does["embedding scale"], view.does["logit scale"] = math.sqrt(hf.hidden_size), 1.0
    view.does["logit soft-cap"] = hf.final_logit_softcapping
    rank = int(keys.get("markov_rank") or 0)
    view.does["head"], view.does["head rank"] = "vanilla" if rank else "none", rank
    if any("gate_proj" in name or "joint_proj" in name for name in directory.entries if name.startswith("markov")):
        view.fails["head"] = "it has no place for a gated or recurrent head's tensors"
    enabled = bool(keys.get("enable_confidence_head", False))
    present = any(name.startswith("confidence_head.") for name in directory.entries)
    view.does["confidence head"] = enabled and present
    view.does["confidence input"] = confidence_input(enabled, bool(keys.get("confidence_head_with_markov", False)))
    missing = [name for name in ("embed_tokens.weight", "lm_head.weight") if name not in directory.entries]
    if missing:
        view.fails["own modules"] = f"it shares nothing of the target with such a draft, and {missing[0]} is missing"
    return view
