"""Routing and experts: the plain loop, transformers' blocks, balancing, and what the statistics count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from modelopt_spec.config import MoEConfig
from modelopt_spec.drafter.experts import Experts, grouped_linear
from modelopt_spec.drafter.experts_reference import experts_reference
from modelopt_spec.drafter.moe import MoE, Router, balance_loss, update_bias
from modelopt_spec.errors import ConfigError

CONFIG = MoEConfig(
    num_experts=5,
    experts_per_token=2,
    intermediate_size=6,
    scoring="sqrtsoftplus",
    normalize_weights=True,
    routed_scaling_factor=1.5,
    swiglu_limit=0.9,
)


def _shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


def _choices(kind: str, tokens: int, experts: int, chosen: int) -> Tensor:
    if kind == "same":
        return torch.arange(chosen).expand(tokens, -1).contiguous()
    scores = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens))
    if kind == "one unused":
        scores[:, 1] = -1.0
    return scores.topk(chosen).indices


@pytest.mark.parametrize("kind", ["random", "one unused", "same"])
@pytest.mark.parametrize(("tokens", "chosen", "limit"), [(11, 2, 0.5), (1, 1, None), (40, 5, None), (0, 2, None)])
def test_experts_equal_the_loop(kind: str, tokens: int, chosen: int, limit: float | None) -> None:
    experts = 6
    module = _shaken(Experts(experts, 8, 10, limit)).double()
    x = torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    weights = torch.rand(tokens, chosen, dtype=torch.float64, requires_grad=True)
    ids = _choices(kind, tokens, experts, chosen)
    got = module(x, ids, weights)
    leaves = (x, weights, module.gate_up_proj, module.down_proj)
    if tokens == 0:
        assert got.shape == (0, 8)
        return
    want = experts_reference(x, ids, weights, module.gate_up_proj, module.down_proj, limit)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    cotangent = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    ours = torch.autograd.grad((got * cotangent).sum(), leaves)
    theirs = torch.autograd.grad((want * cotangent).sum(), leaves)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


def test_grouped_linear_without_some_gradients() -> None:
    x, weight = torch.randn(5, 4), torch.randn(3, 2, 4, requires_grad=True)
    out = grouped_linear(x, weight, torch.tensor([2, 0, 3]))
    out.sum().backward()
    assert weight.grad is not None and float(weight.grad[1].abs().max()) == 0.0
    torch.testing.assert_close(out[2:], x[2:] @ weight[2].T)


def test_equals_transformers_deepseek_v4_block() -> None:
    theirs_config = DeepseekV4Config(
        hidden_size=16,
        moe_intermediate_size=6,
        n_routed_experts=5,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_hash_layers=0,
        swiglu_limit=0.9,
        routed_scaling_factor=1.5,
    )
    theirs_config._experts_implementation = "eager"
    theirs = _shaken(DeepseekV4SparseMoeBlock(theirs_config, 0))
    theirs.gate.e_score_correction_bias.copy_(torch.randn(5) * 0.3)
    ours = MoE(CONFIG, 16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-5, atol=1e-6)


def test_softmax_routing_equals_transformers_qwen3_moe_block() -> None:
    theirs_config = Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=6, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    )
    theirs_config._experts_implementation = "eager"
    theirs = _shaken(Qwen3MoeSparseMoeBlock(theirs_config))
    ours = MoE(
        CONFIG.replace(scoring="softmax", routed_scaling_factor=1.0, swiglu_limit=None, num_shared_experts=0), 16
    )
    missing = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert missing.missing_keys == ["gate.e_score_correction_bias"] and missing.unexpected_keys == []
    x = torch.randn(2, 7, 16)
    out = theirs(x)
    torch.testing.assert_close(ours(x)[0], out[0] if isinstance(out, tuple) else out, rtol=1e-5, atol=1e-6)


def test_bias_moves_the_choice_but_not_the_weights() -> None:
    router = _shaken(Router(CONFIG, 8))
    x = torch.randn(9, 8)
    scores, _, _ = router(x)
    router.e_score_correction_bias[3] = 100.0
    _, ids, weights = router(x)
    assert bool((ids == 3).any(1).all())
    chosen = scores.gather(1, ids)
    torch.testing.assert_close(weights, 1.5 * chosen / chosen.sum(1, keepdim=True))


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
def test_statistics_count_real_tokens_only(scoring: str) -> None:
    block = _shaken(MoE(CONFIG.replace(scoring=scoring), 8))
    x = torch.randn(4, 3, 8)
    valid = torch.tensor([True, False, True, True]).unsqueeze(1).expand(4, 3)
    _, stats = block(x, valid)
    _, alone = block(x[valid[:, 0]])
    for mine, other in zip(stats, alone, strict=True):
        torch.testing.assert_close(mine, other)
    assert float(stats.tokens) == 9.0
    assert float(stats.counts.sum()) == 9 * 2, "every token keeps all of its choices: none is dropped"
    assert 0.0 < float(stats.entropy / stats.tokens) <= float(torch.tensor(5.0).log()) + 1e-6


def test_balance_loss_is_one_when_even_and_grows_with_skew() -> None:
    block = MoE(CONFIG.replace(experts_per_token=5), 8)
    with torch.no_grad():
        block.gate.weight.zero_()
    _, stats = block(torch.randn(10, 8))
    assert float(balance_loss(stats, 5)) == pytest.approx(1.0)
    router = Router(CONFIG.replace(scoring="softmax"), 8)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([8.0, 7.0, 0.0, 0.0, 0.0]).unsqueeze(1) / 8)
    x = torch.ones(10, 8, requires_grad=True)
    scores, ids, _ = router(x)
    loss = balance_loss(router.statistics(scores, ids, None), 2)
    assert float(loss) > 2.0
    loss.backward()
    assert float(router.weight.grad[0].sum()) > 0, "descending lowers the score of an expert with too many tokens"


def test_bias_updates_even_out_a_skewed_router() -> None:
    torch.manual_seed(0)
    router = Router(CONFIG.replace(bias_update_rate=0.02), 8)
    with torch.no_grad():
        router.weight.normal_(std=0.1)
        router.weight[0] += 0.6
    x = torch.randn(500, 8).abs()

    def load() -> Tensor:
        scores, ids, _ = router(x)
        return router.statistics(scores, ids, None).counts

    before = load()
    for _ in range(60):
        update_bias(router, load())
    after = load()
    assert float(before.max() / before.mean()) > 2.0
    assert float(after.max() / after.mean()) < 1.2


def test_router_is_float32_inside_of_a_16_bit_model_and_autocast() -> None:
    block: Any = _shaken(MoE(CONFIG, 16)).bfloat16()
    assert block.gate.weight.dtype == torch.float32 and block.experts.down_proj.dtype == torch.bfloat16
    x = torch.randn(6, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores, _, _ = block.gate(x)
        out, _ = block(x)
    assert scores.dtype == torch.float32 and out.dtype == torch.bfloat16
    torch.testing.assert_close(scores, block.gate.scores(x.float()))


def test_statistics_are_exact_under_autocast() -> None:
    """Counts beyond what 16 bits hold: no choice is lost to rounding."""
    block = _shaken(MoE(CONFIG, 16))
    x = torch.randn(1003, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, stats = block(x)
    scores, ids, _ = block.gate(x)
    assert torch.equal(stats.counts, ids.flatten().bincount(minlength=5).float())
    assert float(stats.counts.sum()) == 2 * 1003
    torch.testing.assert_close(stats.probability, (scores / scores.sum(-1, keepdim=True)).sum(0), rtol=1e-5, atol=1e-4)


def test_float32_experts_under_autocast_multiply_in_16_bit() -> None:
    block = _shaken(MoE(CONFIG, 16))
    x = torch.randn(6, 16)
    exact = block(x)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = block(x)[0]
    assert not torch.equal(rounded.float(), exact)
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)


def test_open_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="open fields"):
        MoE(MoEConfig(num_experts=4), 8)
