"""Starting from another drafter's weights, freezing parts, and another head on a frozen backbone."""

import pytest
import torch
import yaml

from modelopt_spec.checkpoints.distill import distill, distill_recipe
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.store import save
from modelopt_spec.checkpoints.warm_start import freeze_parts, warm_start
from modelopt_spec.conversion import convert
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.training.train import train
from tests.checkpoints.drafts import CASES, converted
from tests.tiny import tiny
from tests.training.tiny_run import losses, make_target, recipe_values, write_chats


@pytest.fixture
def source(tmp_path):
    """A published directory and a checkpoint of the same rnn drafter."""
    model = converted("rnn")
    export(model, tmp_path / "published", quiet=True)
    save(model, tmp_path / "checkpoint")
    return tmp_path, model


@pytest.mark.parametrize("kind", ["published", "checkpoint"])
def test_same_drafter_takes_everything(source, kind):
    root, theirs = source
    model = converted("rnn", seed=1)
    started = warm_start(model, root / kind)
    assert (started.kept, started.unused) == ((), ())
    for name, tensor in theirs.drafter.state_dict().items():
        assert torch.equal(model.drafter.state_dict()[name], tensor)


def test_another_head_takes_backbone_and_shared_tables(source):
    root, theirs = source
    model = converted("vanilla", seed=1)
    started = warm_start(model, root / "published")
    assert started.kept == ()
    assert set(started.unused) == {"markov_head.joint_proj.weight", "markov_head.joint_proj.bias"}
    assert torch.equal(model.drafter.head.markov_w1.weight, theirs.drafter.head.markov_w1.weight)
    other_rank = converted("vanilla", seed=1, head={"type": "vanilla", "rank": 4})
    before = other_rank.drafter.head.markov_w1.weight.clone()
    started = warm_start(other_rank, root / "published")
    assert {"markov_head.markov_w1.weight", "confidence_head.proj.weight"} <= set(started.kept)
    assert torch.equal(other_rank.drafter.head.markov_w1.weight, before)


def test_what_does_not_fit_is_refused(source):
    root, _ = source
    mode, config = CASES["rnn"]
    for changes, message in (
        ({"target_layer_ids": (0, 1, 2)}, r"set target_layer_ids to \[1, 2, 3\]"),
        ({"backbone": {"num_layers": 2}}, None),
        ({"backbone": {"num_layers": 4}}, "does not fit this drafter's backbone"),
        ({"backbone": {"intermediate_size": 64}}, "does not fit this drafter's backbone"),
    ):
        model = tiny("llama")
        convert(model, (mode, {"mask_token_id": 96, "block_size": 5, **config, **changes}), quiet=True)
        if message is None:
            assert warm_start(model, root / "checkpoint").unused
            continue
        with pytest.raises(CheckpointError, match=message):
            warm_start(model, root / "checkpoint")
    with pytest.raises(CheckpointError, match="no drafter"):
        warm_start(tiny("llama"), root / "checkpoint")


def test_freeze_parts():
    drafter = converted("vanilla").drafter
    freeze_parts(drafter, ["backbone", "confidence"])
    assert {name.split(".")[0] for name, p in drafter.named_parameters() if p.requires_grad} == {"markov_head"}
    with pytest.raises(ConfigError, match=r"'backbon'.*Did you mean 'backbone'"):
        freeze_parts(drafter, ["backbon"])
    with pytest.raises(ConfigError, match="nothing to train"):
        freeze_parts(drafter, ["head"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with an rnn head."""
    root = tmp_path_factory.mktemp("run")
    values = recipe_values(
        make_target(root / "target"), write_chats(root / "chats.jsonl", 8), root / "rnn", max_steps=3
    )
    values["drafter"]["head"] = {"type": "rnn", "rank": 6}
    (root / "recipe.yaml").write_text(yaml.safe_dump(values))
    return root, train(root / "recipe.yaml", quiet=True)


def test_distill_trains_the_head_and_nothing_else(run, tmp_path):
    _, first = run
    old = first.model.drafter.state_dict()
    result = distill(
        first.checkpoint, tmp_path / "vanilla", steps=4, overrides=["training.learning_rate=0.05"], quiet=True
    )
    new = result.model.drafter.state_dict()
    heads = ("markov_head.", "confidence_head.")
    for name in new:
        if not name.startswith(heads):
            assert torch.equal(new[name], old[name]), name
    assert not torch.equal(new["markov_head.markov_w2.weight"], old["markov_head.markov_w2.weight"])
    assert result.model.drafter.config.head.type == "vanilla"
    assert result.report["steps"] == 4
    report = export(result.checkpoint, tmp_path / "out", engines=["vllm", "llama.cpp", "sglang"], quiet=True)
    assert report.layout == "deepspec"


def test_a_recipe_starts_from_a_published_directory(run, tmp_path):
    root, first = run
    export(first.model, tmp_path / "published", engines=["sglang"], quiet=True)
    values = yaml.safe_load((root / "recipe.yaml").read_text())
    values["drafter"] |= {"init_from": str(tmp_path / "published"), "freeze": ["backbone"]}
    values["training"] |= {"output_dir": str(tmp_path / "on"), "max_steps": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    result = train(tmp_path / "recipe.yaml", quiet=True)
    old, new = first.model.drafter.state_dict(), result.model.drafter.state_dict()
    frozen = [name for name in new if not name.startswith(("markov_head.", "confidence_head."))]
    assert frozen
    assert all(torch.equal(old[name], new[name]) for name in frozen)
    assert not torch.equal(old["markov_head.joint_proj.weight"], new["markov_head.joint_proj.weight"])


def test_a_distilled_head_learns(run, tmp_path):
    """What the rnn head did with the two shared tables, a vanilla head has to learn anew: its loss falls."""
    _, first = run
    options = ["training.learning_rate=0.03", "training.logging_steps=1"]
    result = distill(first.checkpoint, tmp_path / "vanilla", steps=40, overrides=options, quiet=True)
    values = losses(result.report)
    assert sum(values[-8:]) < 0.9 * sum(values[:8])


def test_distill_mistakes(run, tmp_path):
    _, first = run
    with pytest.raises(ConfigError, match="has a 'rnn' head already"):
        distill_recipe(first.checkpoint, tmp_path, head="rnn")
    with pytest.raises(ConfigError, match="cannot distill"):
        distill_recipe(first.checkpoint, tmp_path, head="gru")
    save(converted("rnn"), tmp_path / "bare")
    with pytest.raises(CheckpointError, match="does not record the recipe"):
        distill_recipe(tmp_path / "bare", tmp_path)
