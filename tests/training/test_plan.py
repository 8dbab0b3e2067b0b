"""`plan`: a recipe's cost without running it, and the forecast from a shorter run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.training.forecast import Fit, Rise, curve_of, fit_rise, fit_tau, forecast
from modelopt_spec.training.plan import GPUS, plan, print_plan
from modelopt_spec.training.recipe import Recipe
from modelopt_spec.training.train import train
from tests.training.tiny_run import make_recipe, make_target, write_chats


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("material")
    return make_target(root / "target"), write_chats(root / "chats.jsonl", 40)


def test_a_plan_describes_the_run_that_follows(material, tmp_path: Path) -> None:
    recipe = make_recipe(*material, tmp_path / "run", num_train_epochs=2, max_steps=-1, save_strategy="no")
    found = plan(recipe)
    assert not (tmp_path / "run").exists(), "nothing is written"
    report = train(recipe, quiet=True).report
    assert found["steps"]["total"] == report["steps"]
    assert found["steps"]["rows_per_step"] == report["rows_per_step"]
    assert found["drafter"]["parameters"] == report["trainable_parameters"]
    assert found["data"]["tokens"] == report["data"]["train"]["tokens"]
    assert found["steps"]["tokens"] == pytest.approx(2 * found["data"]["tokens"])
    assert found["flops"]["step"] == pytest.approx(sum(found["flops"]["by_part"].values()))
    assert found["flops"]["run"] == pytest.approx(found["flops"]["step"] * report["steps"])
    rank = found["memory"]["rank"]
    assert rank["total"] == pytest.approx(sum(value for name, value in rank.items() if name != "total"))
    assert found["time"]["fits"]
    json.dumps(found)


def test_more_ranks_and_kept_features_change_what_they_should(material, tmp_path: Path) -> None:
    base = plan(make_recipe(*material, tmp_path / "run", max_steps=100), gpu="h100")
    four = plan(make_recipe(*material, tmp_path / "run", max_steps=100), gpu="h100", gpus=4)
    assert four["steps"]["rows_per_step"] == 4 * base["steps"]["rows_per_step"]
    assert four["flops"]["step"] == pytest.approx(4 * base["flops"]["step"])
    assert four["time"]["hours"] == pytest.approx(base["time"]["hours"])
    memory = plan(make_recipe(*material, tmp_path / "run", max_steps=100, features="memory"))
    target = base["flops"]["by_part"]["target"]
    saved = target * (100 - 100 / base["steps"]["epochs"])
    assert base["flops"]["run"] - memory["flops"]["run"] == pytest.approx(saved)
    assert memory["memory"]["host"]["features"] == pytest.approx(memory["data"]["tokens"] * 3 * 32 * 4)
    faster = plan(make_recipe(*material, tmp_path / "run", max_steps=100), gpu="b200", efficiency=0.7)
    ratio = GPUS["h100"][0] * 0.35 / (GPUS["b200"][0] * 0.7)
    assert faster["time"]["hours"] == pytest.approx(base["time"]["hours"] * ratio)


def test_length_groups_show_less_padding(material, tmp_path: Path) -> None:
    shuffled = plan(make_recipe(*material, tmp_path / "run"))
    grouped = plan(make_recipe(*material, tmp_path / "run", train_sampling_strategy="group_by_length"))
    assert grouped["data"]["padding"] < shuffled["data"]["padding"]


@pytest.mark.parametrize("mode", ["dspark", "dflash", "domino"])
def test_the_cache_estimate_is_the_cache(material, tmp_path: Path, mode: str) -> None:
    recipe = make_recipe(
        *material, tmp_path / "run", mode, max_steps=1, features="cached", cache_dir=str(tmp_path / "cache")
    )
    found = plan(recipe)
    train(recipe, quiet=True)
    written = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.safetensors"))
    assert found["cache"]["bytes"] == pytest.approx(written, rel=0.05)


def test_printing_names_the_assumption(material, tmp_path: Path) -> None:
    recipe = make_recipe(*material, tmp_path / "run")
    text = io.StringIO()
    print_plan(plan(recipe, gpu="l4"), Console(file=text, width=160))
    shown = " ".join(text.getvalue().split())
    for part in ("drafter", "l4 at 35% of 121 TFLOP/s (data sheet; the share is assumed)", "optimizer", "FLOP"):
        assert part in shown
    assert "fits in 24 GB" in shown


def test_rows_that_do_not_exist_yet_can_be_planned(material, tmp_path: Path) -> None:
    recipe = make_recipe(material[0], tmp_path / "later.jsonl", tmp_path / "run", max_steps=-1, num_train_epochs=2)
    with pytest.raises(DataError, match=r"say how much it will be: rows \(--rows\) and row_tokens"):
        plan(recipe)
    found = plan(recipe, rows=1_000_000, row_tokens=100)
    assert found["data"]["assumed"]
    assert found["data"]["tokens"] == pytest.approx(1e8, rel=0.1)
    assert found["steps"]["total"] == 500_000
    more = plan(recipe, rows=2_000_000, row_tokens=100)
    assert more["flops"]["run"] == pytest.approx(2 * found["flops"]["run"])
    assert more["cache"]["bytes"] == pytest.approx(2 * found["cache"]["bytes"])
    with pytest.raises(ConfigError, match="row_tokens 1000"):
        plan(recipe, rows=10, row_tokens=1000)


def test_drafters_with_experts_are_planned(material, tmp_path: Path) -> None:
    values = make_recipe(*material, tmp_path / "run").model_dump()
    moe = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 24}
    values["drafter"]["backbone"] |= {"mlp": "moe", "residual": "mhc", "moe": moe}
    routed, dense = plan(Recipe(**values)), plan(make_recipe(*material, tmp_path / "run"))
    assert routed["drafter"]["active"] < routed["drafter"]["parameters"]
    assert routed["memory"]["rank"]["activations"] > dense["memory"]["rank"]["activations"]
    assert routed["flops"]["by_part"]["target"] == dense["flops"]["by_part"]["target"]


def test_megatron_ranks_share_a_model(material, tmp_path: Path) -> None:
    values = make_recipe(*material, tmp_path / "run", max_steps=10).model_dump()
    split = Recipe(**{**values, "megatron": {"tensor": 2}})
    found, plain = plan(split, gpus=4), plan(Recipe(**values), gpus=2)
    assert found["steps"]["rows_per_step"] == plain["steps"]["rows_per_step"]
    assert found["memory"]["rank"]["target"] == pytest.approx(plain["memory"]["rank"]["target"] / 2)
    assert found["time"]["hours"] == pytest.approx(plain["time"]["hours"] / 2)
    with pytest.raises(ConfigError, match=r"gpus is 3, .* over 2 ranks"):
        plan(split, gpus=3)


def test_memory_is_that_of_the_longest_rows(material, tmp_path: Path) -> None:
    recipe = make_recipe(*material, tmp_path / "run", per_device_train_batch_size=1)
    mean, peak = plan(recipe, rows=1000, row_tokens=40), plan(recipe, rows=1000, row_tokens=200)
    assert peak["memory"]["rank"]["activations"] > mean["memory"]["rank"]["activations"]
    longer = recipe.replace(data=recipe.data.replace(max_length=64))
    cut = plan(longer, rows=1000, row_tokens=40)
    assert cut["memory"]["rank"]["features"] == pytest.approx(64 * 3 * 32 * 4), (
        "64 tokens, two taps and the last hidden"
    )


def test_mistakes_are_named(material, tmp_path: Path) -> None:
    recipe = make_recipe(*material, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"'h10'.*'h100'"):
        plan(recipe, gpu="h10")
    with pytest.raises(ConfigError, match=r"efficiency is 1\.5"):
        plan(recipe, efficiency=1.5)


# ---- forecast --------------------------------------------------------------------------------------------------------


def report_of(tokens: np.ndarray, tau: np.ndarray, name: str = "eval_tau", **training) -> dict:
    """A training report with a curve: one row of 100 tokens a step."""
    curves = [{"step": int(n / 100), name: float(t)} for n, t in zip(tokens, tau, strict=True)]
    return {
        "data": {"train": {"tokens": 10_000_000, "samples": 100_000}},
        "rows_per_step": 1,
        "recipe": {"drafter": {"block_size": 7}, "training": training},
        "curves": curves,
    }


TRUTH = Fit(ceiling=3.6, gain=0.9, exponent=0.4, n_mid=1e5)


def test_a_curve_without_noise_is_recovered() -> None:
    tokens = np.geomspace(1e4, 1e6, 30)
    fit = fit_tau(tokens, TRUTH(tokens), limit=8)
    assert fit.ceiling == pytest.approx(3.6, abs=1e-6)
    assert fit.exponent == pytest.approx(0.4)
    assert fit(1e8) == pytest.approx(TRUTH(1e8), abs=1e-6)


def test_the_fit_is_the_best_of_a_brute_search() -> None:
    generator = np.random.default_rng(3)
    tokens = np.geomspace(1e4, 1e6, 12)
    tau = TRUTH(tokens) + generator.normal(0, 0.05, 12)
    fit = fit_tau(tokens, tau, limit=8)
    error = ((fit(tokens) - tau) ** 2).sum()
    ceilings, gains = np.meshgrid(np.linspace(1, 8, 60), np.linspace(0, 3, 60))
    for exponent in np.linspace(0.05, 2, 40):
        others = ceilings[..., None] - gains[..., None] * (tokens / fit.n_mid) ** -exponent
        assert ((others - tau) ** 2).sum(-1).min() >= error - 1e-9


def test_a_slow_start_is_recovered_and_no_grid_point_is_better() -> None:
    tokens, truth = np.geomspace(1e4, 1e6, 40), Rise(ceiling=2.4, half=3e5, exponent=1.5)
    noise = np.random.default_rng(5).normal(0, 0.03, (3, 40))
    exact, *noisy = fit_rise(tokens, np.stack([truth(tokens), *(truth(tokens) + noise)]), limit=8)
    assert exact(2e6) == pytest.approx(truth(2e6), rel=0.02)
    for curve, found in zip(truth(tokens) + noise, noisy, strict=True):
        assert found(2e6) == pytest.approx(truth(2e6), rel=0.15)
        error = ((found(tokens) - curve) ** 2).sum()
        for half in np.geomspace(1e4, 1e8, 25):
            for exponent in np.linspace(0.25, 4, 16):
                for ceiling in np.linspace(1, 8, 15):
                    assert ((Rise(ceiling, half, exponent)(tokens) - curve) ** 2).sum() >= 0.98 * error


def test_both_laws_are_in_the_interval() -> None:
    """A curve that begins slowly: the power law alone flattens too early."""
    tokens, truth = np.linspace(1e4, 3e5, 60), Rise(ceiling=2.4, half=3e5, exponent=2.0)
    noise = np.random.default_rng(1).normal(0, 0.02, 60)
    found = forecast(report_of(tokens, truth(tokens) + noise), [6e5])
    (point,) = found["at"]
    assert point["low"] <= truth(6e5) <= point["high"]
    assert set(found["laws"]) == {"power", "rise"}
    alone = fit_tau(tokens[6:], truth(tokens)[6:], limit=8)(6e5)
    assert abs(alone - truth(6e5)) > 0.05


def test_long_curves_are_thinned_not_cut() -> None:
    tokens = np.linspace(1e4, 1e6, 1500)
    noise = np.random.default_rng(2).normal(0, 0.1, 1500)
    found = forecast(report_of(tokens, TRUTH(tokens) + noise), [2e6], resamples=40)
    assert found["points"] == 1350
    assert found["at"][0]["tau"] == pytest.approx(TRUTH(2e6), abs=0.05)


def test_limits_hold() -> None:
    tokens = np.geomspace(1e3, 1e5, 20)
    growing = fit_tau(tokens, 1 + np.log(tokens), limit=5)
    assert growing.ceiling <= 5
    falling = fit_tau(tokens, 3 - np.log10(tokens) / 10, limit=5)
    assert falling.gain >= 0
    assert falling(1e9) == pytest.approx(falling(1e3), abs=1e-9), "no forecast of a fall without end"
    with pytest.raises(DataError, match="3 points"):
        fit_tau([1, 2], [1, 2], limit=5)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    tokens = np.linspace(1e5, 2e6, 40)
    inside = []
    for seed in range(24):
        noise = np.random.default_rng(seed).normal(0, 0.03, len(tokens))
        found = forecast(report_of(tokens, TRUTH(tokens) + noise), [8e6], resamples=60, seed=seed)
        (point,) = found["at"]
        assert point["low"] <= point["tau"] <= point["high"]
        inside.append(point["low"] <= TRUTH(8e6) <= point["high"])
    assert 0.6 <= np.mean(inside) <= 0.98


def test_intervals_widen_with_distance_and_noise() -> None:
    tokens = np.linspace(1e5, 2e6, 40)
    noise = np.random.default_rng(0).normal(0, 1, len(tokens))

    def width(scale: float, at: float) -> float:
        (point,) = forecast(report_of(tokens, TRUTH(tokens) + scale * noise), [at])["at"]
        return point["high"] - point["low"]

    assert width(0.02, 2e6) < width(0.02, 2e7)
    assert width(0.02, 2e7) < width(0.08, 2e7)


def test_held_out_values_come_first_and_caveats_follow_the_run() -> None:
    tokens = np.linspace(1e4, 1e6, 20)
    report = report_of(tokens, TRUTH(tokens), lr_scheduler_type="cosine")
    report["curves"] += [{"step": int(n / 100), "tau": 1.5} for n in tokens]
    found = forecast(report, [5e7])
    assert found["metric"] == "eval_tau"
    assert any("cosine" in note for note in found["caveats"])
    assert any("passes over the same 10,000,000 tokens" in note for note in found["caveats"])
    assert any("20 times" in note for note in found["caveats"])
    training_only = forecast(report_of(tokens, TRUTH(tokens), "tau", lr_scheduler_type="constant"))
    assert training_only["metric"] == "tau"
    assert len(training_only["at"]) == 3
    assert training_only["caveats"] == [
        "measured on training batches: data.validation_share and training.eval_steps give held-out rows"
    ]


def test_tokens_are_counted_from_steps() -> None:
    report = report_of(np.arange(1, 11) * 100.0, np.linspace(1, 2, 10))
    report["rows_per_step"] = 4
    tokens, tau, name = curve_of(report)
    assert tokens.tolist() == [400.0 * (i + 1) for i in range(10)]
    assert (len(tau), name) == (10, "eval_tau")
    with pytest.raises(DataError, match=r"10 points, .* needs 8"):
        forecast(report, skip=0.5)


def test_a_plan_with_a_report_forecasts_its_end(material, tmp_path: Path) -> None:
    recipe = make_recipe(*material, tmp_path / "run", max_steps=20, save_strategy="no")
    train(recipe, quiet=True)
    longer = recipe.replace(training=recipe.training.model_copy(update={"max_minutes": None}))
    found = plan(longer, report=tmp_path / "run" / "report.json")
    assert found["forecast"]["at"][0]["tokens"] == found["steps"]["tokens"]
    text = io.StringIO()
    print_plan(found, Console(file=text, width=200))
    assert "forecast: tau" in text.getvalue()
