"""Tensor names of a DeepSeek-V4 draft: our state dict on one side, ``mtp.{i}.*`` of the checkpoint on the other.

Stage i of the draft is ``mtp.{i}``; what reads the taps stands in the first stage, what leaves the draft in the last.
Our names are transformers' names of the same modules; the experts of a stage are stacked there and single in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["expert_files", "file_names", "kept_float32", "stage_count"]

_STAGE = {
    "self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "self_attn.kv_proj.weight": "attn.wkv.weight",
    "self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "self_attn.sinks": "attn.attn_sink",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "attn_hc.fn": "hc_attn_fn",
    "attn_hc.base": "hc_attn_base",
    "attn_hc.scale": "hc_attn_scale",
    "ffn_hc.fn": "hc_ffn_fn",
    "ffn_hc.base": "hc_ffn_base",
    "ffn_hc.scale": "hc_ffn_scale",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
}
_FIRST = {"main_proj.weight": "main_proj.weight", "main_norm.weight": "main_norm.weight"}
_LAST = {
    "norm.weight": "norm.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_head.markov_w2.weight",
    "confidence_head.proj.weight": "confidence_head.proj.weight",
}
_FLOAT32 = re.compile(r"mtp\.\d+\.(hc_|ffn\.gate\.)")
_STAGE_NAME = re.compile(r"mtp\.(\d+)\.")


def file_names(stages: int) -> dict[str, str]:
    """Our name -> the file's, of every tensor but the routed experts."""
    names = {ours: f"mtp.0.{file}" for ours, file in _FIRST.items()}
    for stage in range(stages):
        names |= {f"layers.{stage}.{ours}": f"mtp.{stage}.{file}" for ours, file in _STAGE.items()}
    return names | {ours: f"mtp.{stages - 1}.{file}" for ours, file in _LAST.items()}


def expert_files(stages: int, experts: int) -> Iterator[tuple[str, int, int, str]]:
    """(our stacked name, expert, half, the file's name): half 0 is the gate or all of it, 1 the up rows."""
    for stage in range(stages):
        for expert in range(experts):
            place = f"mtp.{stage}.ffn.experts.{expert}"
            yield f"layers.{stage}.mlp.experts.gate_up_proj", expert, 0, f"{place}.w1.weight"
            yield f"layers.{stage}.mlp.experts.gate_up_proj", expert, 1, f"{place}.w3.weight"
            yield f"layers.{stage}.mlp.experts.down_proj", expert, 0, f"{place}.w2.weight"


def kept_float32(file_name: str) -> bool:
    """Whether a tensor is float32 whatever the draft's type: hyper-connections and routers."""
    return _FLOAT32.match(file_name) is not None


def stage_count(names: Iterator[str] | list[str]) -> int:
    """Stages that a list of tensor names shows."""
    found = [int(match.group(1)) for name in names if (match := _STAGE_NAME.match(name))]
    return max(found) + 1 if found else 0
