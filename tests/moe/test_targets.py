"""Targets with experts or streams: taps, refusals, what a drafter takes over, lossless generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import modelopt_spec as mtsp
from modelopt_spec.conversion import convert
from modelopt_spec.errors import UnsupportedError
from modelopt_spec.targets.base import open_target
from tests.moe.blocks import batch, loss_of
from tests.moe.v4 import SIZES, shake, v4_target
from tests.tiny import COMMON

MOE_TARGETS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 40},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "head_dim": None,
    },
}
EXPERT_WIDTH = {"qwen3_moe": 24, "mixtral": 40, "deepseek_v3": 24}


def _target(kind: str) -> Any:
    torch.manual_seed(0)
    values = {**COMMON, "num_hidden_layers": 4, **MOE_TARGETS[kind]}
    config = AutoConfig.for_model(kind, **{name: value for name, value in values.items() if value is not None})
    model = AutoModelForCausalLM.from_config(config)
    shake(model, 0.15)
    return model.eval()


def _ids(rows: int = 2, length: int = 21) -> Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(1))


# ---- DeepSeek-V4 ---------------------------------------------------------------------------------------------------


def test_taps_are_the_mean_of_the_streams_on_every_kind_of_layer() -> None:
    """Windowed, 4-fold and 128-fold compressed layers; long enough that the compressed ones emit entries."""
    model = v4_target(
        (0, 4, 128, 0), compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    )
    assert model.config.layer_types[1:3] == ["compressed_sparse_attention", "heavily_compressed_attention"]
    ids = _ids()
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    target = open_target(model)
    layers = (-1, 0, 1, 2, 3)
    features = target.features(ids, layers)
    assert features.taps.shape == (2, 21, 5 * 32)
    streams = [state for state in states.hidden_states if state.ndim == 4]
    for place, layer in enumerate(layers):
        got = features.taps[..., 32 * place : 32 * (place + 1)]
        want = streams[layer + 1] if len(streams) == 5 else _by_hand(model, ids, layer)
        torch.testing.assert_close(got, want.mean(2), rtol=0, atol=0)
        assert layer < 0 or float(want.std(dim=2).max()) > 1e-3, "the streams differ, so the mean is not one of them"
    torch.testing.assert_close(target.logits(features.last_hidden), states.logits)
    target.verify()


def _by_hand(model: Any, ids: Tensor, layer: int) -> Tensor:
    """The streams behind one layer, recorded by a hook of the test's own."""
    kept: dict[str, Tensor] = {}
    module = model.model.layers[max(layer, 0)]

    def keep(_: nn.Module, args: tuple, kwargs: dict, output: Tensor) -> None:
        kept["streams"] = output if layer >= 0 else (args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    handle.remove()
    return kept["streams"]


def test_a_v4_drafter_takes_over_everything_that_it_shares_with_its_target() -> None:
    model = v4_target()
    convert(model, ("dspark", {"mask_token_id": 90, "backbone": {"type": "moe_mhc"}}), quiet=True)
    config = model.drafter.config
    backbone = config.backbone
    assert (backbone.num_layers, config.target_layer_ids) == (2, (2, 3))
    assert (backbone.head_dim, backbone.num_attention_heads, backbone.sliding_window) == (16, 4, 8)
    assert backbone.latent_attention.model_dump() == {
        name: SIZES[name] for name in ("q_lora_rank", "qk_rope_head_dim", "o_groups", "o_lora_rank")
    }
    moe = backbone.moe
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size, moe.swiglu_limit) == (4, 2, 32, 0.9)
    assert moe.routed_scaling_factor == model.config.routed_scaling_factor == 1.5
    assert backbone.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "output",
    [
        lambda streams: streams.flatten(2),
        lambda streams: streams.transpose(1, 2),
        lambda streams: streams[:, :, :2],
        lambda streams: streams.unsqueeze(0),
    ],
)
def test_unknown_stream_layouts_are_refused(output: Any) -> None:
    """Flattened, moved, missing or nested streams never become features."""
    model = v4_target((0, 0))

    class Odd(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return self.layer(*args, **kwargs)

    model.model.layers[0] = Odd(model.model.layers[0])
    model.model.layers[0].register_forward_hook(lambda module, args, streams: output(streams))
    target = open_target(model)
    with pytest.raises((UnsupportedError, RuntimeError, ValueError, IndexError)) as error, target.tapped([0]):
        model(input_ids=_ids(), use_cache=False)
    assert isinstance(error.value, UnsupportedError) and "stream layout" in str(error.value)


def test_streams_of_an_unknown_architecture_are_refused() -> None:
    model = v4_target((0, 0))
    model.config.model_type = "another_v4"
    with pytest.raises(UnsupportedError, match="stream layout"):
        open_target(model).features(_ids(), [0])


# ---- other targets with experts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MOE_TARGETS)
def test_moe_targets_give_taps_and_expert_sizes(kind: str) -> None:
    model = _target(kind)
    convert(
        model,
        ("dspark", {"block_size": 4, "mask_token_id": 95, "backbone": {"mlp": "moe", "residual": "mhc"}}),
        quiet=True,
    )
    moe = model.drafter.config.backbone.moe
    assert (moe.num_experts, moe.experts_per_token, moe.intermediate_size) == (4, 2, EXPERT_WIDTH[kind])
    ids = _ids()
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    taps = open_target(model).features(ids, [0, 2]).taps
    torch.testing.assert_close(taps, torch.cat([states[1], states[3]], dim=-1))


@pytest.mark.parametrize("kind", MOE_TARGETS)
@pytest.mark.parametrize("backbone", [{"mlp": "moe", "residual": "mhc"}, {"type": "moe_mhc", "sliding_window": 7}])
def test_generation_on_moe_targets_is_lossless(kind: str, backbone: dict[str, Any]) -> None:
    """A batch of prompts, drafted by an untrained mixture: the tokens are the target's own."""
    model = _target(kind)
    convert(model, ("dspark", {"block_size": 4, "mask_token_id": 95, "backbone": backbone}), quiet=True)
    shake(model.drafter, 0.2)
    ids = _ids(2, 6)
    got = mtsp.generate(model, ids, max_new_tokens=9, temperature=0.0, eos_token_id=None).sequences
    want = ids
    with torch.no_grad():
        for _ in range(9):
            want = torch.cat([want, model(input_ids=want, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert got[:, : want.shape[1]].tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_a_step_of_training_moves_every_part(kind: str) -> None:
    model = _target(kind)
    convert(
        model,
        ("dspark", {"block_size": 4, "mask_token_id": 95, "backbone": {"mlp": "moe", "residual": "mhc"}}),
        quiet=True,
    )
    drafter = model.drafter.train()
    shake(drafter, 0.1)
    _, features, blocks = batch(drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    before = {name: tensor.clone() for name, tensor in drafter.named_parameters()}
    loss_of(drafter, features, blocks).backward()
    optimizer.step()
    still = [name for name, tensor in drafter.named_parameters() if torch.equal(tensor, before[name])]
    assert still == []
