"""Module cases: hyper-connections around toy sublayers, and one whole DeepSeek-V4 decoder layer, with all gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.config import BackboneConfig, HyperConnectionConfig, LatentAttentionConfig, MoEConfig
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan, plan_blocks
from modelopt_spec.drafter.attention_reference import visible_keys
from modelopt_spec.drafter.hyper_connections import HyperConnection, StreamCollapse
from modelopt_spec.drafter.moe_attention import InterleavedRotary
from modelopt_spec.drafter.moe_stage import MoEStage
from tests.golden.runner import Row, compare, torch_dtype


def check_module_case(case: dict[str, Any], tensors: dict[str, Tensor], dtype: str) -> list[Row]:
    """Compare every tensor of the case in one precision: (name, difference, tolerance, ok) each."""
    run = _layer if "num_attention_heads" in case["config"] else _toy
    module, streams, ours = run(case, tensors, torch_dtype(dtype))
    prefix = "f64." if dtype == "float64" else ""
    rows = [
        compare(f"{dtype}: out.{name}", got, tensors.get(f"{prefix}out.{name}", tensors.get(f"out.{name}")), dtype)
        for name, got in ours.items()
    ]
    for name, parameter in [*module.named_parameters(), ("in.streams", streams)]:
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        rows.append(compare(f"{dtype}: grad.{name}", got, tensors[f"{prefix}grad.{name}"], dtype))
    return rows


def expected_names(case: dict[str, Any], tensors: dict[str, Tensor]) -> set[str]:
    """Every output and gradient that a case holds: what :func:`check_module_case` must have compared."""
    return {name for name in tensors if name.startswith(("out.", "grad."))}


def _load(module: nn.Module, case: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    module.to(dtype).load_state_dict({name: tensors[name].to(dtype) for name in case["weights"]})
    return module


def _hyper(config: dict[str, Any]) -> HyperConnectionConfig:
    return HyperConnectionConfig(
        streams=config["hc_mult"], sinkhorn_iterations=config["hc_sinkhorn_iters"], eps=config["hc_eps"]
    )


def _mixing(site: str, module: HyperConnection, streams: Tensor, *, pre: bool) -> dict[str, Tensor]:
    """The coefficients of one site, [B, S, ...]."""
    collapsed, mixing = module(streams)
    lead = streams.shape[:-2]
    found = {
        f"{site}.collapsed": collapsed,
        f"{site}.comb": mixing.comb.unflatten(0, lead),
        f"{site}.post": mixing.post.unflatten(0, lead),
    }
    return {**found, f"{site}.pre": mixing.pre.unflatten(0, lead)} if pre else found


# ---- toy sublayers ---------------------------------------------------------------------------------------------------


class _ToyLayer(nn.Module):
    """y = W norm(x) twice, each around the streams, and the last collapse."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["rms_norm_eps"]
        self.attn_hc, self.ffn_hc = (HyperConnection(_hyper(config), width, eps) for _ in range(2))
        self.hc_head = StreamCollapse(_hyper(config), width, eps)
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, eps=eps) for _ in range(2))
        self.sublayer1, self.sublayer2 = (nn.Linear(width, width, bias=False) for _ in range(2))


def _toy(
    case: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype
) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    layer = _ToyLayer(case["config"])
    _load(layer, case, tensors, dtype)
    streams = tensors["in.streams"].to(dtype).clone().requires_grad_()
    x, mixing = layer.attn_hc(streams)
    first = layer.attn_hc.merge(streams, layer.sublayer1(layer.input_layernorm(x)), mixing)
    x, mixing = layer.ffn_hc(first)
    second = layer.ffn_hc.merge(first, layer.sublayer2(layer.post_attention_layernorm(x)), mixing)
    collapsed = layer.hc_head(second)
    loss = (collapsed * tensors["in.cotangent"].to(dtype)).sum()
    loss.backward()
    ours = {
        **_mixing("attn", layer.attn_hc, streams, pre=True),
        **_mixing("ffn", layer.ffn_hc, first, pre=True),
        "streams_after_sublayer1": first,
        "streams_after_sublayer2": second,
        "hc_head": collapsed,
        "loss": loss,
    }
    return layer, streams, {name: tensor.detach() for name, tensor in ours.items()}


# ---- a whole layer ---------------------------------------------------------------------------------------------------


def _backbone(config: dict[str, Any]) -> BackboneConfig:
    return BackboneConfig(
        type="moe_mhc",
        num_layers=1,
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=1,
        head_dim=config["head_dim"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        causal=True,
        sliding_window=config["sliding_window"],
        window_rule="query",
        hyper_connection=_hyper(config),
        latent_attention=LatentAttentionConfig(
            q_lora_rank=config["q_lora_rank"],
            qk_rope_head_dim=config["qk_rope_head_dim"],
            o_groups=config["o_groups"],
            o_lora_rank=config["o_lora_rank"],
        ),
        moe=MoEConfig(
            num_experts=config["n_routed_experts"],
            experts_per_token=config["num_experts_per_tok"],
            intermediate_size=config["moe_intermediate_size"],
            num_shared_experts=config["n_shared_experts"],
            scoring=config["scoring_func"],
            normalize_weights=config["norm_topk_prob"],
            routed_scaling_factor=config["routed_scaling_factor"],
            swiglu_limit=config["swiglu_limit"],
        ),
    )


def _layer(
    case: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype
) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    """The S tokens of a row are one causal block of S slots without context: the same as a causal window layer."""
    backbone = _backbone(case["config"])
    stage = MoEStage(backbone)
    _load(stage, case, tensors, dtype)
    leaf = tensors["in.streams"].to(dtype).clone().requires_grad_()
    batch, length = leaf.shape[:2]
    plan = plan_blocks(
        torch.zeros(batch, 1, dtype=torch.long),
        torch.ones(batch, 1, dtype=torch.bool),
        block_size=length,
        seq_len=1,
        causal=True,
        window=backbone.sliding_window,
        window_rule="query",
    )
    rotary = InterleavedRotary(backbone)
    angles = rotary(torch.arange(length).expand(batch, 1, -1), dtype)
    nothing = torch.zeros(batch, 1, backbone.hidden_size or 0, dtype=dtype)
    unused = rotary(torch.zeros(batch, 1, dtype=torch.long), dtype)
    out, _ = stage(leaf.unsqueeze(1), nothing, angles, unused, plan)
    loss = (out.squeeze(1) * tensors["in.cotangent"].to(dtype)).sum()
    loss.backward()
    with torch.no_grad():
        ours = _inside(stage, leaf.unsqueeze(1), nothing, angles, unused, plan)
    ours |= {"streams": out.squeeze(1).detach(), "loss": loss.detach()}
    return stage, leaf, ours


def _inside(
    stage: MoEStage, streams: Tensor, nothing: Tensor, angles: Any, unused: Any, plan: BlockAttentionPlan
) -> dict[str, Tensor]:
    """What stands between the layer's input and its output, [B, S, ...]."""
    x, mixing = stage.attn_hc(streams)
    normed = stage.input_layernorm(x)
    attended = stage.self_attn(normed, nothing, angles, unused, plan)
    after = stage.attn_hc.merge(streams, attended, mixing)
    tokens, _ = stage.ffn_hc(after)
    normed_tokens = stage.post_attention_layernorm(tokens).squeeze(1)
    moe_out, _ = stage.mlp(normed_tokens)
    flat = normed_tokens.flatten(0, 1)
    _, ids, weights = stage.mlp.gate(flat)
    lead = normed_tokens.shape[:2]
    q, keys = stage.self_attn.queries(normed, angles).squeeze(1), stage.self_attn.keys(normed, angles).squeeze(1)
    visible = visible_keys(plan)[:, 0, :, 1:]
    scores = torch.einsum("bqhd,bkd->bhqk", q, keys.squeeze(2)) * stage.self_attn.scale
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    sinks = stage.self_attn.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    assert stage.mlp.shared_experts is not None
    return {
        **{name: part.squeeze(1) for name, part in _mixing("attn", stage.attn_hc, streams, pre=False).items()},
        **{name: part.squeeze(1) for name, part in _mixing("ffn", stage.ffn_hc, after, pre=False).items()},
        "attn_output": attended.squeeze(1),
        "attn_probs": torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1],
        "streams_after_attn": after.squeeze(1),
        "moe_output": moe_out,
        "shared_expert_output": stage.mlp.shared_experts(normed_tokens),
        "router_logits": (flat @ stage.mlp.gate.weight.T).unflatten(0, lead),
        "topk_ids": ids.unflatten(0, lead),
        "topk_weights": weights.unflatten(0, lead),
        "visible": visible,
        "rope_cos": angles[0][:1, 0],
        "rope_sin": angles[1][:1, 0],
    }
