"""Damaged descriptions and cards are refused in one line that names the file and the field."""

import json
import shutil

import pytest

import modelopt_spec as mtsp
from modelopt_spec.checkpoints.opening import recorded_target
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.errors import CheckpointError
from tests.checkpoints.drafts import converted
from tests.tiny import tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint and an export of it."""
    root = tmp_path_factory.mktemp("made")
    mtsp.save(converted(), root / "checkpoint")
    mtsp.export(root / "checkpoint", root / "draft", quiet=True)
    return root


def damaged(source, out, file, change):
    """A copy whose JSON file is changed: a text replaces it, entries replace entries, with ... for none."""
    shutil.copytree(source, out)
    if isinstance(change, dict):
        content = json.loads((out / file).read_text())
        for path, value in change.items():
            *parents, last = path.split(".")
            holder = content
            for name in parents:
                holder = holder[name]
            if value is ...:
                del holder[last]
            else:
                holder[last] = value
        change = json.dumps(content)
    (out / file).write_text(change)
    return out


def refused(call, file, field):
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert str(file) in message
    assert field in message
    return message


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("{", "not valid JSON"),
        ("[]", "a list"),
        ({"config": ...}, "config is missing"),
        ({"config": None}, "config is missing"),
        ({"config": []}, "config is []"),
        ({"config": {}}, "config.algorithm"),
        ({"config.algorithm": "eagle"}, "config.algorithm is 'eagle'"),
        ({"config.algorithm": ["dspark"]}, "config.algorithm"),
        ({"config.blok": 1}, "'blok'"),
        ({"config.head": []}, "head"),
        ({"config.vocab_size": None}, "config.vocab_size"),
        ({"config.backbone.hidden_size": None}, "config.backbone.hidden_size"),
        ({"sha256": ...}, "sha256"),
        ({"sha256": 3}, "sha256 is 3"),
        ({"target": [1]}, "target is [1]"),
        ({"target_identity": [1]}, "target_identity is [1]"),
        ({"target_identity.facts": "x"}, "target_identity.facts is 'x'"),
        ({"target_identity.facts.more": 1}, "'more'"),
        ({"recipe": [1]}, "recipe is [1]"),
        ({"recipe": {"model": "x"}}, "recipe.model is 'x'"),
    ],
)
def test_a_damaged_description(made, tmp_path, change, field):
    path = damaged(made / "checkpoint", tmp_path / "checkpoint", "drafter.json", change)
    refused(lambda: mtsp.restore(tiny("llama"), path), path / "drafter.json", field)
    refused(lambda: mtsp.export(path, tmp_path / "out", quiet=True), path / "drafter.json", field)
    refused(lambda: recorded_target(path), path / "drafter.json", field)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("{", "not valid JSON"),
        ("[]", "list"),
        ({"target": [1]}, "target is [1]"),
        ({"target": "x"}, "target is 'x'"),
        ({"target": ...}, "target is missing"),
        ({"target.name": 3}, "target.name is 3"),
        ({"target.facts": {"embedding_scale": "x"}}, "target.facts.embedding_scale is 'x'"),
        ({"layout": ...}, "layout is missing"),
        ({"engines": []}, "engines is []"),
        ({"engines.load": "vllm"}, "engines.load is 'vllm'"),
        ({"fingerprint": 1}, "fingerprint is 1"),
        ({"trained": []}, "trained is []"),
        ({"trained.algorithm": "eagle"}, "trained"),
        ({"trained.blok": 1}, "'blok'"),
        ({"recipe": {"data": []}}, "recipe.data is []"),
        ({"quantization": "x"}, "quantization is 'x'"),
    ],
)
def test_a_damaged_card(made, tmp_path, change, field):
    path = damaged(made / "draft", tmp_path / "draft", "drafter_card.json", change)
    for call in (lambda: mtsp.load_drafter(path, tiny("llama")), lambda: check(path), lambda: recorded_target(path)):
        assert "delete that file" in refused(call, path / "drafter_card.json", field)
    (path / "drafter_card.json").unlink()
    mtsp.load_drafter(path, tiny("llama"), quiet=True)
    assert check(path).ok
