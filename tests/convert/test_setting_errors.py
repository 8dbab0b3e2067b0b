"""Mistakes in settings are told by the key that was written, wherever the settings stand."""

from __future__ import annotations

from typing import Any

import pytest

import modelopt_spec as mtsp
from modelopt_spec.config import BackboneConfig, DSparkConfig
from modelopt_spec.data.config import DataConfig
from modelopt_spec.errors import ConfigError
from modelopt_spec.training.recipe import load_recipe
from tests.decoding.tiny import tiny_target

IN_A_RECIPE = {
    "drafter.block_size=1": "drafter.block_size is 1: it must be greater than or equal to 2",
    "drafter.head.rank=wide": "drafter.head.rank is 'wide': it must be a whole number",
    "drafter.backbone.moe={num_experts: 2, experts_per_token: 3}": (
        "drafter.backbone.moe.experts_per_token is 3, more than num_experts 2"
    ),
    "drafter.backbone.head_dim=7": "drafter.backbone.head_dim 7 must be even (rotary embedding)",
    "drafter.num_taps=5": "drafter.num_taps is 5 but target_layer_ids names 2: give one of them",
    "drafter.confidence.with_markov=3": "drafter.confidence.with_markov is 3: it must be true or false",
    "training.max_steps=many": "training.max_steps is 'many': it must be a whole number",
    "training.learning_rate=fast": "training.learning_rate is 'fast': it must be a number",
    "training.num_anchors=0": "training.num_anchors is 0: it must be greater than or equal to 1",
    "training.cache.dtype=int8": "training.cache.dtype is 'int8': it must be 'auto', 'float32', 'bf16' or 'fp8'",
    "data.max_length=short": "data.max_length is 'short': it must be a whole number",
    "data.train=3": "data.train is 3: it must be a list",
    "loss.ce=-1": "loss.ce is -1: it must be greater than or equal to 0",
    "drafter=3": "drafter is 3: it must be a mapping of settings",
    "export.engines=vllm": "export.engines is 'vllm': it must be a list",
}
UNKNOWN = {
    "drafter.blok_size=7": ("drafter has no field 'blok_size' (value 7). Did you mean 'block_size'?"),
    "drafter.backbone.num_layer=2": "drafter.backbone has no field 'num_layer' (value 2). Did you mean 'num_layers'?",
    "training.max_step=3": "training has no field 'max_step' (value 3). Did you mean 'max_steps'?",
    "training.remote.url=x": "training.remote has no field 'url' (value 'x'). Did you mean 'base_url'?",
    "trainig.max_steps=3": "the recipe has no field 'trainig' (value {'max_steps': 3}). Did you mean 'training'?",
    "data.train=[{pth: x}]": "data.train.0 has no field 'pth' (value 'x'). Did you mean 'path'?",
}


@pytest.mark.parametrize("override", IN_A_RECIPE)
def test_values_of_a_recipe(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("dspark/smollm2_135m", [override])
    assert str(caught.value) == IN_A_RECIPE[override]


@pytest.mark.parametrize("override", UNKNOWN)
def test_unknown_keys_of_a_recipe(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("dspark/smollm2_135m", [override])
    assert str(caught.value).startswith(UNKNOWN[override])


def test_several_mistakes_are_all_told() -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("dspark/smollm2_135m", ["data.max_length=1", "training.num_anchors=0"])
    assert "data.max_length is 1: it must be" in str(caught.value)
    assert "; training.num_anchors is 0: it must be" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 1}, "block_size of mode dspark is 1: it must be greater than or equal to 2"),
        ({"head": {"rank": 0}}, "head.rank is 0: it must be greater than or equal to 1"),
        ({"blok_size": 7}, "mode dspark has no field 'blok_size' (value 7). Did you mean 'block_size'?"),
        ({"backbone": {"num_layer": 1}}, "backbone has no field 'num_layer' (value 1). Did you mean 'num_layers'?"),
        ({"backbone": 5}, "backbone of mode dspark is 5: it must be a mapping of settings"),
    ],
)
def test_convert(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mtsp.convert(tiny_target(), ("dspark", config), quiet=True)
    assert str(caught.value).startswith(message)


def test_settings_made_in_python_are_called_by_their_class() -> None:
    with pytest.raises(ConfigError, match=r"^max_length of DataConfig is 1: it must be greater"):
        DataConfig(max_length=1)
    with pytest.raises(ConfigError, match=r"^BackboneConfig has no field 'layers'"):
        BackboneConfig(layers=1)


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    recipe = load_recipe("dspark/smollm2_135m", ["training.learning_rate='1e-4'", "training.max_steps='12'"])
    assert recipe.training.arguments()["learning_rate"] == 1e-4
    assert recipe.training.arguments()["max_steps"] == 12


def test_configs_are_mappings_and_modelopts_own_where_it_sees_them() -> None:
    from modelopt.torch.opt.config import ModeloptBaseConfig

    from modelopt_spec.conversion import SpecModeRegistry

    config = DSparkConfig(block_size=5)
    assert dict(config)["block_size"] == config["block_size"] == 5
    assert "blok_size" not in config
    with pytest.raises(KeyError):
        _ = config["model_dump"]
    seen = SpecModeRegistry["mtsp_dspark"].config_class(**config.model_dump())
    assert isinstance(seen, ModeloptBaseConfig)
    assert isinstance(seen, DSparkConfig)
    assert seen.model_dump() == config.model_dump()
    model = tiny_target()
    mtsp.convert(model, ("dspark", DSparkConfig(block_size=5, mask_token_id=3)), quiet=True)
    assert type(model.drafter.config) is DSparkConfig
