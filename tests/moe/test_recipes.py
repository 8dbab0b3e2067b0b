"""Recipes with experts and streams: what they become on targets of their architecture, and one that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from modelopt_spec.config import BackboneConfig
from modelopt_spec.conversion import MODES
from modelopt_spec.resolve import resolve
from modelopt_spec.targets.hf import read_shape
from modelopt_spec.training.recipe import load_recipe
from modelopt_spec.training.sizes import sizes
from modelopt_spec.training.train import train
from tests.training.tiny_run import make_target, write_chats

QWEN3_30B_A3B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def _drafter(name: str, target_config: Any) -> Any:
    """The recipe's drafter for a target of full size, both without memory."""
    from modelopt_spec.drafter.drafter import build_drafter

    recipe = load_recipe(name)
    with torch.device("meta"):
        shape = read_shape(AutoModelForCausalLM.from_config(target_config))
        return build_drafter(resolve(MODES[recipe.mode](**recipe.drafter_config), shape))


def test_deepseek_v4_flash_is_the_published_draft() -> None:
    """Sizes of the released draft: three stages of the target's own shape, read from transformers' default config."""
    drafter = _drafter("dspark/deepseek_v4_flash", DeepseekV4Config())
    config = drafter.config
    backbone: BackboneConfig = config.backbone
    assert (config.block_size, config.target_layer_ids, config.mask_token_id) == (5, (40, 41, 42), 128799)
    assert (backbone.num_layers, backbone.sliding_window, backbone.head_dim) == (3, 128, 512)
    assert (backbone.moe.num_experts, backbone.moe.experts_per_token, backbone.moe.swiglu_limit) == (256, 6, 10.0)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert shapes["main_proj.weight"] == (4096, 3 * 4096)
    assert shapes["layers.0.self_attn.o_a_proj.weight"] == (8 * 1024, 64 * 512 // 8)
    assert shapes["hc_head.hc_fn"] == (4, 4 * 4096)
    assert shapes["confidence_head.proj.weight"] == (1, 4096 + 256)
    found = sizes(drafter, rows=1, length=4096, num_anchors=512, compute_bytes=2)
    assert 19e9 < found.parameters < 22e9 and found.active < 1.1e9
    assert found.checkpointed_bytes < found.activation_bytes


@pytest.mark.parametrize("name", ["dspark/qwen3_30b_a3b_mhc", "domino/qwen3_30b_a3b"])
def test_qwen3_30b_a3b_gets_a_small_mixture(name: str) -> None:
    drafter = _drafter(name, AutoConfig.for_model("qwen3_moe", **QWEN3_30B_A3B))
    backbone = drafter.config.backbone
    assert (backbone.head_dim, backbone.num_key_value_heads, backbone.moe.intermediate_size) == (128, 4, 768)
    found = sizes(drafter, rows=1, length=4096, num_anchors=512, compute_bytes=2)
    assert found.active < 0.5 * found.parameters < 0.6e9
    assert (backbone.residual == "mhc") == name.endswith("_mhc")


def test_the_tiny_recipe_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe itself, on a target of a few thousand weights and eight steps."""
    target, data = make_target(tmp_path / "target"), write_chats(tmp_path / "data.jsonl", 16)
    recipe = load_recipe(
        "dspark/tiny_moe_mhc",
        [
            f"model.name_or_path={target}",
            "model.dtype=float32",
            f"data.train={data}",
            "drafter.target_layer_ids=[1,3]",
            "drafter.backbone.head_dim=8",
            "training.bf16=false",
            "training.max_steps=8",
            "training.warmup_steps=0",
            "training.logging_steps=1",
            f"training.output_dir={tmp_path / 'run'}",
        ],
    )
    result = train(recipe)
    shown = capsys.readouterr().err
    assert "active for a slot" in shown and "(Adam, float32)" in shown
    losses = [row["loss"] for row in result.report["curves"] if "loss" in row]
    assert losses[-1] < losses[0]
    assert result.model.drafter.config.backbone.type == "moe_mhc"
