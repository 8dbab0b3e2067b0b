"""How engines read a DeepSeek-V4 draft (layout ``deepseek_v4``), each by its own code: refusals, facts, launch lines.

vLLM 0.32 (``models/deepseek_v4/nvidia/dspark.py``, CUDA builds only), SGLang 0.5.23 (``models/deepseek_v4_dspark.py``)
and llama.cpp (``conversion/deepseek.py``, ``src/models/dflash.cpp``, also on a CPU). TensorRT-LLM has no such draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.engines.base import Directory, Serving, View, confidence_input
from modelopt_spec.checkpoints.layouts.deepseek_v4_names import stage_count
from modelopt_spec.config import DrafterConfig

__all__ = ["LAYOUT", "PACKED_EXPERTS", "holds_draft", "launch", "notes", "reads", "refuses"]

LAYOUT = "deepseek_v4"
PACKED_EXPERTS = "MXFP4"
"""What :class:`Serving` calls a draft whose routed experts are 4-bit floats."""
WINDOW_RULES = {"vllm": "block", "sglang": "block", "llama.cpp": "query"}
_LLAMA_STREAMS = 4
_LLAMA_RATIOS = (0, 4, 128)
_LLAMA_INDEXER = 64
_VLLM_STAGES = 3


def holds_draft(directory: Directory) -> bool:
    """Whether a directory has the tensors of such a draft."""
    return "mtp.0.main_proj.weight" in directory.entries


def refuses(engine: str, serving: Serving) -> str | None:
    """Why an engine does not serve a DeepSeek-V4 draft as it was trained; None if it does."""
    config = serving.config
    if engine not in WINDOW_RULES:
        return "it has no DeepSeek-V4 draft; serve with vLLM, SGLang or llama.cpp"
    rule = WINDOW_RULES[engine]
    if config.backbone.window_rule != rule:
        return (
            f"it counts the window by rule {rule!r} and this draft was trained with "
            f"{config.backbone.window_rule!r}; train with backbone.window_rule {rule}"
        )
    streams = config.backbone.hyper_connection.streams if config.backbone.hyper_connection else 1
    if engine == "llama.cpp" and streams != _LLAMA_STREAMS:
        return f"it runs {_LLAMA_STREAMS} residual streams only, not {streams}; train with hyper_connection.streams 4"
    if engine == "llama.cpp" and serving.quantization != PACKED_EXPERTS:
        return (
            "its converter takes routed experts as MXFP4 only: write the draft beside its target with such experts "
            "(mtsp export-beside --experts mxfp4)"
        )
    return None


def notes(engine: str, serving: Serving) -> list[str]:
    """What to know before serving."""
    if engine == "vllm":
        return ["vllm: DeepSeek-V4 drafts need a GPU build; the CPU build has none"]
    return []


def launch(engine: str, config: DrafterConfig, target: str, draft: str) -> str:
    """The command line that serves a target with a draft beside or inside of its checkpoint."""
    count = config.block_size
    if engine == "vllm":
        settings = f'{{"method": "dspark", "model": "{draft}", "num_speculative_tokens": {count}}}'
        return f"vllm serve {target} --speculative-config '{settings}'"
    if engine == "sglang":
        return (
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm DSPARK "
            f"--speculative-draft-model-path {draft} --speculative-num-draft-tokens {count + 1}"
        )
    return (
        f"convert_hf_to_gguf.py {target} --outfile target.gguf && "
        f"convert_hf_to_gguf.py {draft} --dspark --target-model-dir {target} --outfile draft.gguf && "
        f"llama-server -m target.gguf -md draft.gguf --spec-type draft-dspark --spec-draft-n-max {count} -np 1"
    )


def reads(engine: str, directory: Directory) -> View:
    """What an engine does with the keys and tensors of a directory."""
    view, keys = View(), directory.config
    if engine not in WINDOW_RULES:
        view.fails["format"] = "it has no DeepSeek-V4 draft"
        return view
    taps = keys.get("dspark_target_layer_ids")
    stages = _stages(engine, keys, directory)
    last = f"mtp.{stage_count(list(directory.entries)) - 1}."
    confidence = f"{last}confidence_head.proj.weight" in directory.entries
    view.does |= {
        "taps": tuple(taps) if taps is not None else None,
        "anchor layout": "anchor_first" if keys.get("sample_from_anchor", True) else "bonus_anchor",
        "block size": keys.get("dspark_block_size"),
        "mask token": keys.get("dspark_noise_token_id"),
        "shape": (
            stages,
            keys.get("hidden_size"),
            keys.get("num_attention_heads"),
            1,
            keys.get("head_dim"),
            keys.get("moe_intermediate_size"),
        ),
        "rope base": _rope_base(keys),
        "rope scaling": {"rope_type": "default"},
        "rotated share": 1.0,
        "norm epsilon": keys.get("rms_norm_eps"),
        "activation": "silu",
        "attention bias": False,
        "window": keys.get("sliding_window"),
        "window rule": WINDOW_RULES[engine],
        "causality": False,
        "attention sink": True,
        "logit scale": 1.0,
        "logit soft-cap": None,
        "embedding scale": 1.0,
        "draft vocabulary": None,
        "d2t": "none",
        "head": "vanilla",
        "head rank": keys.get("dspark_markov_rank"),
        "confidence head": confidence,
        "confidence input": confidence_input(confidence, True),
    }
    _failures(engine, keys, directory, stages, view)
    return view


def _stages(engine: str, keys: Mapping[str, Any], directory: Directory) -> int:
    """vLLM takes a key (or 3), SGLang the number of taps, llama.cpp the tensors that are there."""
    if engine == "vllm":
        return int(keys.get("n_mtp_layers") or _VLLM_STAGES)
    if engine == "sglang":
        return len(keys.get("dspark_target_layer_ids") or ())
    return stage_count(list(directory.entries))


def _rope_base(keys: Mapping[str, Any]) -> float | None:
    nested = keys.get("rope_parameters") or {}
    given = keys.get("rope_theta") or (nested.get("main") or {}).get("rope_theta")
    return float(given) if given is not None else None


def _failures(engine: str, keys: Mapping[str, Any], directory: Directory, stages: int, view: View) -> None:
    present = stage_count(list(directory.entries))
    if stages != present:
        view.fails["shape"] = f"it builds {stages} stages, the files hold {present}"
    if not keys.get("dspark_markov_rank"):
        view.fails["head rank"] = "it needs dspark_markov_rank > 0"
    if engine == "llama.cpp":
        _llama_failures(keys, directory, present, view)
    ratios = keys.get("compress_ratios")
    layers = keys.get("num_hidden_layers") or 0
    if engine == "vllm" and isinstance(ratios, list) and (len(ratios) < layers + stages or any(ratios[layers:])):
        view.fails["window"] = f"compress_ratios needs {stages} zeros behind the target's {layers} entries"


def _llama_failures(keys: Mapping[str, Any], directory: Directory, stages: int, view: View) -> None:
    """What its converter refuses, and what kills it while it loads."""
    if keys.get("hc_mult", _LLAMA_STREAMS) != _LLAMA_STREAMS:
        view.fails["shape"] = f"hc_mult {keys['hc_mult']}: it runs {_LLAMA_STREAMS} residual streams only"
    expert = directory.entries.get("mtp.0.ffn.experts.0.w1.weight")
    if expert is not None and expert.dtype not in ("I8", "U8"):
        view.fails["dtype"] = "its converter takes routed experts as MXFP4 only"
    last = f"mtp.{stages - 1}."
    if not all(f"mtp.{i}.ffn.gate.bias" in directory.entries for i in range(stages)):
        view.fails["head"] = "a stage without ffn.gate.bias crashes it"
    markov = f"{last}markov_head.markov_w1.weight" in directory.entries
    if not markov and f"{last}confidence_head.proj.weight" in directory.entries:
        view.fails["confidence head"] = "a confidence head without the Markov matrices crashes it"
    if any(not name.startswith("mtp.") for name in directory.entries):
        _llama_target_failures(keys, view)


def _llama_target_failures(keys: Mapping[str, Any], view: View) -> None:
    """The target's compressed layers, where its tensors stand in the same directory."""
    ratios = [ratio for ratio in keys.get("compress_ratios") or () if ratio is not None]
    unknown = sorted(set(ratios) - set(_LLAMA_RATIOS))
    if unknown:
        view.fails["window"] = f"compress_ratios {unknown} crash it: it knows {', '.join(map(str, _LLAMA_RATIOS))}"
    elif ratios and 4 not in ratios:
        view.fails["window"] = "a target without any layer of compress ratio 4 crashes it"
    indexer = keys.get("index_head_dim")
    if indexer is not None and (indexer % _LLAMA_INDEXER or indexer == keys.get("head_dim")):
        view.fails["shape"] = (
            f"index_head_dim {indexer} crashes it: it must be a multiple of {_LLAMA_INDEXER} other than head_dim"
        )
