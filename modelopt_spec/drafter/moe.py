"""Mixture of experts: a router, routed experts, a shared expert, and what balances the load.

    score_e = act(gate_e . x)                      act: sqrt(softplus), sigmoid or softmax
    chosen  = top-k of score + bias                the bias takes part in the choice only
    weight  = score / (sum over the chosen + 1e-20) * routed_scaling_factor
    out     = sum_k weight_k expert_k(x) + shared(x)                   (DeepSeek-V3 and V4; transformers' `deepseek_v4`)

Two ways to keep the experts evenly loaded: after each optimizer step the bias of an expert with more than the mean load
goes down by a fixed amount and that of one with less goes up (no gradient; DeepSeek-V3, arXiv 2412.19437, section
2.1.2), or an auxiliary loss ``E / k * sum_e f_e P_e`` with f_e the share of choices and P_e the mean normalised score
(Switch Transformer, arXiv 2101.03961, equation 4). No token is ever dropped.

Legend: M tokens, k experts a token, E experts, D hidden, I width of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4MLP

from modelopt_spec.config import MoEConfig
from modelopt_spec.drafter.experts import Experts
from modelopt_spec.drafter.hyper_connections import Float32Module
from modelopt_spec.errors import ConfigError

__all__ = ["MoE", "Router", "RoutingStats", "balance_loss", "update_bias"]


class RoutingStats(NamedTuple):
    """What the router of one layer did with a batch's real tokens, as sums."""

    counts: Tensor
    """[E] choices of each expert."""
    probability: Tensor
    """[E] sum of the normalised scores; the auxiliary loss differentiates it."""
    entropy: Tensor
    """[] sum of the entropy of the normalised scores, in nats."""
    tokens: Tensor
    """[] tokens."""


class Router(Float32Module):
    """Scores and chooses experts, in float32 whatever the model's type."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        experts = config.num_experts or 0
        if None in (config.num_experts, config.experts_per_token, config.scoring, config.normalize_weights):
            raise ConfigError(f"backbone.moe {config.model_dump()} has open fields: resolve it with a target")
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(experts, dtype=torch.float32))
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)

    def scores(self, x: Tensor) -> Tensor:
        """[M, D] -> [M, E], before any bias."""
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(exact), self.weight.to(exact))
            if self.config.scoring == "softmax":
                return logits.softmax(-1)
            return logits.sigmoid() if self.config.scoring == "sigmoid" else F.softplus(logits).sqrt()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[M, D] -> scores [M, E], chosen experts [M, k] in ascending order, their weights [M, k]."""
        scores = self.scores(x)
        biased = scores.detach() + self.e_score_correction_bias
        ids = biased.topk(self.config.experts_per_token or 1, dim=-1).indices.sort(dim=-1).values
        weights = scores.gather(1, ids)
        if self.config.normalize_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return scores, ids, weights * (self.config.routed_scaling_factor or 1.0)

    def statistics(self, scores: Tensor, ids: Tensor, valid: Tensor | None) -> RoutingStats:
        """Sums over the tokens that are valid ([M] bool; all of them if None), exact under autocast too."""
        real = torch.ones_like(ids[:, 0], dtype=torch.bool) if valid is None else valid
        with torch.autocast(scores.device.type, enabled=False):
            share = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
            real = real.to(share.dtype)
            chosen = torch.zeros_like(share).scatter(1, ids, 1.0).detach()
            entropy = -(share * share.clamp(min=1e-20).log()).sum(-1).detach()
            return RoutingStats(real @ chosen, real @ share, real @ entropy, real.sum())


class MoE(nn.Module):
    """Router, experts and, if there are any, shared experts."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        width = config.intermediate_size or 0
        self.gate = Router(config, hidden_size)
        self.experts = Experts(config.num_experts or 0, hidden_size, width, config.swiglu_limit)
        self.shared_experts: DeepseekV4MLP | None = None
        if config.num_shared_experts:
            self.shared_experts = DeepseekV4MLP(
                DeepseekV4Config(
                    hidden_size=hidden_size,
                    moe_intermediate_size=width * config.num_shared_experts,
                    swiglu_limit=float("inf") if config.swiglu_limit is None else config.swiglu_limit,
                    num_hidden_layers=1,
                )
            )

    def forward(self, x: Tensor, valid: Tensor | None = None) -> tuple[Tensor, RoutingStats]:
        """[..., D] and which tokens are real ([...] bool) -> [..., D] and what the router did."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, ids, weights = self.gate(tokens)
        out = self.experts(tokens, ids, weights).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out, self.gate.statistics(scores, ids, None if valid is None else valid.reshape(-1))


def balance_loss(stats: RoutingStats, experts_per_token: int) -> Tensor:
    """E / k * sum_e f_e P_e of one layer: 1 when the load is even, E / k at worst. Differentiable in the scores."""
    tokens = stats.tokens.clamp(min=1)
    experts = stats.counts.shape[0]
    return experts / experts_per_token * (stats.counts / tokens * stats.probability / tokens).sum()


@torch.no_grad()
def update_bias(router: Router, counts: Tensor) -> None:
    """Move each expert's bias one step towards even load, given the choices [E] of a whole optimizer step."""
    router.e_score_correction_bias += router.config.bias_update_rate * torch.sign(counts.mean() - counts).to(
        router.e_score_correction_bias
    )
