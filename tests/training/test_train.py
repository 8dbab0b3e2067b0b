"""`train`: a recipe file in, a drafter, its report and its export out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import modelopt_spec as mtsp
from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.targets.cached import CachedFeatures
from modelopt_spec.targets.load import load_target
from modelopt_spec.training import train as train_module
from modelopt_spec.training.plan import plan
from modelopt_spec.training.recipe import LOSS_DEFAULTS
from modelopt_spec.training.train import train
from tests.training.tiny_run import losses, make_recipe, make_target, recipe_values, state_of, write_chats, write_recipe

TERMS = {"dspark": {"ce", "tv", "confidence"}, "dflash": {"ce"}, "domino": {"ce", "base_ce"}}


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("material")
    return make_target(root / "target"), write_chats(root / "chats.jsonl", 18)


@pytest.mark.parametrize("mode", list(TERMS))
def test_a_recipe_file_trains(material, tmp_path, mode: str) -> None:
    values = recipe_values(*material, tmp_path / "run", mode, warmup_steps=1)
    recipe = write_recipe(tmp_path / "recipe.yaml", values)
    result = train(recipe, ["training.max_steps=8", "training.learning_rate=0.03"], quiet=True)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report == json.loads(json.dumps(result.report))
    assert report["kind"] == "modelopt_spec.training_report"
    assert (report["steps"], report["seed"], report["world_size"], report["rows_per_step"]) == (8, 3, 1, 4)
    assert report["data"]["train"]["fingerprint"]
    assert report["recipe"]["training"]["learning_rate"] == 0.03
    assert report["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    logs = [entry for entry in report["curves"] if "loss" in entry]
    assert [entry["step"] for entry in logs] == list(range(1, 9))
    for name in TERMS[mode] - {"base_ce"}:
        assert all(np.isfinite(entry[name]) for entry in logs), name
    if mode == "domino":
        assert logs[0]["lambda"] > 0 == logs[-1]["lambda"]
        assert "base_ce" in logs[0]
    assert all(entry["tau"] >= 1 for entry in logs)
    assert any("acceptance/0" in entry for entry in logs)
    assert ("tau_probability" in logs[0]) == (mode == "dspark")
    weights = LOSS_DEFAULTS[mode]
    if mode != "domino":
        expected = [sum(weights[name] * entry[name] for name in TERMS[mode]) for entry in logs]
        np.testing.assert_allclose([entry["loss"] for entry in logs], expected, rtol=1e-4)
    assert np.mean(losses(report)[-3:]) < losses(report)[0]
    model = mtsp.restore(load_target(str(material[0])), result.checkpoint)
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(tensor, result.model.drafter.state_dict()[name])
    original = load_target(str(material[0])).state_dict()
    for name, tensor in result.model.state_dict().items():
        if not name.startswith("drafter."):
            assert torch.equal(tensor, original[name]), "the target is as it was"


def test_memory_and_cached_features_train_like_online_ones(material, tmp_path, monkeypatch) -> None:
    options = {"max_steps": 10, "save_strategy": "no"}
    online = train(make_recipe(*material, tmp_path / "online", **options), quiet=True)
    memory = train(make_recipe(*material, tmp_path / "memory", features="memory", **options), quiet=True)
    read = []
    original = CachedFeatures.features
    monkeypatch.setattr(CachedFeatures, "features", lambda self, *a: read.append(1) or original(self, *a))
    cached_recipe = make_recipe(
        *material, tmp_path / "cached", features="cached", cache_dir=str(tmp_path / "cache"), **options
    )
    cached = train(cached_recipe, quiet=True)
    assert len(read) == 10
    for other in (memory, cached):
        np.testing.assert_allclose(losses(other.report), losses(online.report), rtol=1e-6)
        for name, tensor in state_of(online.model.drafter).items():
            torch.testing.assert_close(other.model.drafter.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)


def test_a_recipe_says_how_features_are_stored(material, tmp_path) -> None:
    options = {"max_steps": 4, "save_strategy": "no", "features": "cached", "cache_dir": str(tmp_path / "cache")}
    online = train(make_recipe(*material, tmp_path / "online", max_steps=4, save_strategy="no"), quiet=True)
    rough = make_recipe(*material, tmp_path / "fp8", cache={"dtype": "fp8", "positions": "all"}, **options)
    expected_bytes = plan(rough)["cache"]["bytes"]
    found = train(rough, quiet=True)
    index = json.loads((tmp_path / "cache" / "index.json").read_text())
    assert (index["dtype"], index["positions"]) == ("fp8", "all")
    written = sum(file.stat().st_size for file in (tmp_path / "cache").glob("*.safetensors"))
    assert expected_bytes == pytest.approx(written, rel=0.05)
    np.testing.assert_allclose(losses(found.report), losses(online.report), rtol=0.02)
    assert losses(found.report) != losses(online.report), "fp8 taps are not the target's own"
    with pytest.raises(DataError, match=r"cache\.max_gb"):
        train(make_recipe(*material, tmp_path / "tight", cache={"max_gb": 1e-6}, **options), quiet=True)


def test_packed_recipes_and_dpace_train(material, tmp_path) -> None:
    recipe = make_recipe(*material, tmp_path / "run", max_steps=4)
    recipe = recipe.replace(
        data=recipe.data.replace(pack=True),
        loss=recipe.loss.replace(position_weights="dpace", dpace_alpha=0.3),
    )
    result = train(recipe, quiet=True)
    assert result.report["data"]["train"]["samples"] < 18
    assert len(losses(result.report)) == 4


def test_bf16_autocast_keeps_float32_master_weights(material, tmp_path) -> None:
    result = train(make_recipe(*material, tmp_path / "run", bf16=True, max_steps=4), quiet=True)
    exact = train(make_recipe(*material, tmp_path / "exact", max_steps=4), quiet=True)
    assert {p.dtype for p in result.model.drafter.parameters()} == {torch.float32}
    state = torch.load(tmp_path / "run" / "checkpoint-4" / "optimizer.pt", weights_only=True)["state"]
    assert {values["exp_avg"].dtype for values in state.values()} == {torch.float32}
    np.testing.assert_allclose(losses(result.report), losses(exact.report), rtol=0.02)
    assert losses(result.report) != losses(exact.report), "autocast did run"


def test_validation_rows_are_scored_on_the_way(material, tmp_path) -> None:
    recipe = make_recipe(*material, tmp_path / "run", eval_strategy="steps", eval_steps=3, features="memory")
    result = train(recipe.replace(data=recipe.data.replace(validation_share=0.25)), quiet=True)
    scored = [entry for entry in result.report["curves"] if "eval_loss" in entry]
    assert [entry["step"] for entry in scored] == [3, 6]
    for entry in scored:
        assert entry["eval_tau"] >= 1
        assert entry["eval_loss"] == pytest.approx(
            0.1 * entry["eval_ce"] + 0.9 * entry["eval_tv"] + entry["eval_confidence"]
        )


def test_the_report_of_a_run_in_progress_is_not_there(material, tmp_path, monkeypatch) -> None:
    class Broken(Exception):
        pass

    def broken(*args, **kwargs):
        raise Broken

    monkeypatch.setattr(train_module, "_report", broken)
    with pytest.raises(Broken):
        train(make_recipe(*material, tmp_path / "run", max_steps=1), quiet=True)
    assert not (tmp_path / "run" / "report.json").exists()


def test_mistakes_in_the_training_section_are_named(material, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"lerning_rate.*learning_rate"):
        make_recipe(*material, tmp_path / "run", lerning_rate=1.0)
    with pytest.raises(ConfigError, match="training:"):
        train(make_recipe(*material, tmp_path / "run", lr_scheduler_type="unheard_of"), quiet=True)
    with pytest.raises(ConfigError, match="cache_dir"):
        train(make_recipe(*material, tmp_path / "run", features="cached"), quiet=True)
    with pytest.raises(ConfigError, match="overrides need a recipe's name"):
        train(make_recipe(*material, tmp_path / "run"), ["training.seed=1"], quiet=True)
