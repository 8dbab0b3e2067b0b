"""Recipes side by side: what was trained once is not trained again, and rounds of all seeds are pooled by prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelopt_spec.errors import ConfigError
from modelopt_spec.reports.comparison import COLUMNS, comparison_rows, draw_comparison
from modelopt_spec.training import comparison as comparison_module
from modelopt_spec.training.comparison import compare_recipes, summarise
from tests.training.tiny_run import make_target, recipe_values, write_chats, write_recipe


def entry(name: str, head: str, *seeds: dict[int, tuple[int, int]]) -> dict:
    """An entry whose rounds verified one slot: {prompt: (rounds, committed)} of each seed."""
    runs = []
    for counts in seeds:
        rounds, committed = (sum(pair[place] for pair in counts.values()) for place in (0, 1))
        pooled = {"conditional_acceptance": [committed / rounds - 1], "conditional_rounds": [rounds]}
        rows = [{"prompt": prompt, "rounds": pair[0], "committed": pair[1]} for prompt, pair in counts.items()]
        runs.append({"evaluation": {"per_prompt": rows, "pooled": pooled}})
    return {"name": name, "head": head, "runs": runs}


def test_rounds_are_pooled_over_seeds_and_paired_by_prompt() -> None:
    with_head = entry("b", "vanilla", {0: (10, 15), 1: (30, 33)}, {0: (10, 19), 1: (10, 11)})
    without = entry("a", "none", {0: (10, 12), 1: (10, 10)}, {0: (20, 24), 1: (10, 10)})
    comparison = {"entries": [with_head, without]}
    summarise(comparison)
    assert comparison["baseline"] == "a"
    assert without["summary"]["tau"] == pytest.approx(56 / 50)
    assert without["summary"]["difference"] is without["summary"]["difference_interval"] is None
    found = with_head["summary"]
    assert found["tau"] == pytest.approx(78 / 60)
    assert found["conditional_acceptance"] == [pytest.approx(18 / 60)]
    assert found["difference"] == pytest.approx(78 / 60 - 56 / 50)
    # both prompts drawn twice: 44/40 - 20/20 and 34/20 - 36/30 bound what a draw of two can give
    low, high = found["difference_interval"]
    assert low == pytest.approx(44 / 40 - 1)
    assert high == pytest.approx(34 / 20 - 36 / 30)


def test_without_a_plain_entry_the_first_is_the_baseline() -> None:
    comparison = {"entries": [entry("x", "rnn", {0: (5, 6)}), entry("y", "vanilla", {0: (5, 7)})]}
    summarise(comparison)
    assert comparison["baseline"] == "x"
    assert comparison["entries"][1]["summary"]["difference"] == pytest.approx(1 / 5)
    assert comparison["entries"][1]["summary"]["difference_interval"] is None


def test_a_stopped_comparison_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, data = make_target(tmp_path / "target"), write_chats(tmp_path / "chats.jsonl", 12)
    recipes = []
    for mode in ("dspark", "dflash"):
        values = recipe_values(target, data, tmp_path / "unused", mode, max_steps=3)
        recipes.append(str(write_recipe(tmp_path / f"{mode}.yaml", values)))
    entries = [recipes[0], recipes[1], f"{recipes[0]}:drafter.head.type=rnn"]
    trained = []
    train = comparison_module.train

    def counted(recipe: str, *args, **kwargs):
        trained.append(recipe)
        if len(trained) == 4:
            raise KeyboardInterrupt
        return train(recipe, *args, **kwargs)

    monkeypatch.setattr(comparison_module, "train", counted)
    options = {"seeds": (0, 1), "limit": 3, "max_new_tokens": 6}
    with pytest.raises(KeyboardInterrupt):
        compare_recipes(entries, tmp_path / "out", [data], **options)
    result = compare_recipes(entries, tmp_path / "out", [data], **options)
    assert trained == [recipes[0]] * 2 + [recipes[1]] * 3 + [recipes[0]] * 2
    written = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert written["kind"] == "mtsp.recipe_comparison"
    assert [found["head"] for found in written["entries"]] == ["vanilla", "none", "rnn"]
    assert written["baseline"] == entries[1]
    for found in written["entries"]:
        first, second = (run["evaluation"]["pooled"] for run in found["runs"])
        together = first["tau"] * first["rounds"] + second["tau"] * second["rounds"]
        assert found["summary"]["tau"] == pytest.approx(together / (first["rounds"] + second["rounds"]))
    for changed, message in (
        ({"overrides": ["training.max_steps=2"]}, "seed-0 was made with training.max_steps 3, not 2"),
        ({"max_new_tokens": 7}, "evaluation.json was made with max_new_tokens 6, not 7"),
        ({"limit": 2}, "evaluation.json was made with prompts"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare_recipes(entries, tmp_path / "out", [data], **{**options, **changed})
    rows = comparison_rows(written)
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert draw_comparison(written, tmp_path / "figure.png").stat().st_size > 5000
