"""Every recipe that ships loads, and converts a small stand-in of its target's architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

import modelopt_spec as mtsp
from modelopt_spec.errors import ConfigError
from modelopt_spec.training.recipe import builtin_recipes, load_recipe
from tests.tiny import tiny

STAND_INS = {"qwen3": "qwen3", "llama": "llama", "gemma": "gemma3_text", "qwen2": "qwen2", "smollm2": "llama"}
DENSE = [
    name for name in builtin_recipes() if not any(part in name for part in ("a3b", "deepseek", "megatron", "tiny"))
]


def test_there_are_recipes() -> None:
    assert {"dspark/smollm2_135m", "dspark/qwen3_8b", "dflash/qwen3_8b", "domino/qwen3_8b"} <= set(DENSE)


@pytest.mark.parametrize("name", builtin_recipes())
def test_loads_and_says_where_its_numbers_come_from(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.metadata.name == name
    assert recipe.metadata.description
    assert recipe.metadata.source


@pytest.mark.parametrize("name", DENSE)
def test_converts_a_stand_in(name: str) -> None:
    recipe = load_recipe(name)
    architecture = next(kind for prefix, kind in STAND_INS.items() if prefix in name)
    model = tiny(architecture, num_hidden_layers=30)
    config = {**recipe.drafter_config, "mask_token_id": 96}
    config.pop("mask_token", None)
    mtsp.convert(model, (recipe.mode, config), quiet=True)
    assert model.drafter.config.block_size == recipe.drafter_config["block_size"]


def test_overrides_have_types(tmp_path: Path) -> None:
    recipe = load_recipe(
        "dspark/smollm2_135m",
        ["training.max_steps=3", "training.bf16=false", "drafter.target_layer_ids=[1,2]", "loss.decay=null"],
    )
    assert recipe.training.arguments()["max_steps"] == 3
    assert recipe.training.arguments()["bf16"] is False
    assert recipe.drafter_config["target_layer_ids"] == [1, 2]
    assert recipe.loss.decay is None


def test_a_strategy_of_no_is_the_word() -> None:
    recipe = load_recipe("dspark/smollm2_135m", ["training.save_strategy=no", "training.eval_strategy=no"])
    assert recipe.training.arguments()["save_strategy"] == recipe.training.arguments()["eval_strategy"] == "no"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainig.max_steps=3"], "Did you mean 'training'"),
        (["training.max_step=3"], "Did you mean 'max_steps'"),
        (["drafter.blok_size=3"], "Did you mean 'block_size'"),
        (["drafter.mode=dsparc"], "Did you mean 'dspark'"),
        (["loss.tvv=1"], "Did you mean 'tv'"),
        (["drafter.confidence.enabled=false"], "set loss.confidence to 0"),
        (["training.max_steps"], "not of the form"),
    ],
)
def test_mistakes_name_the_field_and_the_fix(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("dspark/smollm2_135m", overrides)


def test_unknown_recipe() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dspark/smollm2_135m'"):
        load_recipe("dspark/smollm2_135")
