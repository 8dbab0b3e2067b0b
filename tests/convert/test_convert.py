"""convert attaches a drafter and changes nothing else."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path

import modelopt.torch.opt as mto
import pytest
import torch

import modelopt_spec as mtsp
from modelopt_spec.config import DSparkConfig
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.drafter.heads.vanilla import VanillaMarkovHead
from modelopt_spec.errors import CheckpointError, ConfigError, UnsupportedError
from modelopt_spec.targets.hf import HFTarget
from tests.tiny import TEXT_MODELS, tiny, tiny_vision_language

IDS = torch.arange(3, 23).view(2, 10)
SMALL = {"mask_token_id": 96, "block_size": 4, "head": {"rank": 6}}


def drafters_equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_target_behaves_as_before(name: str, tied: bool) -> None:
    model = tiny(name, tie_word_embeddings=tied)
    kind, before = type(model), model(IDS).logits
    generated = model.generate(IDS, max_new_tokens=8, do_sample=False)
    returned = mtsp.convert(model, ("dspark", SMALL), quiet=True)
    assert returned is model
    assert isinstance(model, kind)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(model.generate(IDS, max_new_tokens=8, do_sample=False), generated)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trainable == {f"drafter.{n}" for n, _ in model.drafter.named_parameters()}


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_features_are_hidden_states(name: str) -> None:
    model = tiny(name)
    target = HFTarget(model)
    states = model(IDS, output_hidden_states=True).hidden_states
    features = target.features(IDS, (-1, 0, 2, 4))
    want = torch.cat([states[0], states[1], states[3], states[5]], dim=-1)
    torch.testing.assert_close(features.taps, want, rtol=0, atol=0)
    torch.testing.assert_close(target.logits(features.last_hidden), model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_vision_language_wrapper() -> None:
    model = tiny_vision_language()
    before = model(IDS).logits
    mtsp.convert(model, ("dspark", SMALL), quiet=True)
    assert model.drafter.config.backbone.hidden_size == 32
    assert model.drafter.config.num_target_layers == 6
    assert torch.equal(model(IDS).logits, before)
    assert not any(p.requires_grad for n, p in model.named_parameters() if not n.startswith("drafter."))


FORMS = [
    "dspark",
    "dflash",
    "domino",
    ("dspark", SMALL),
    [("dspark", SMALL)],
    ["dflash"],
    {"algorithm": "dspark", "config": SMALL},
    ("dspark", DSparkConfig(**SMALL)),
]


@pytest.mark.parametrize("mode", FORMS, ids=str)
def test_every_form_of_modelopt(mode: object) -> None:
    model = mtsp.convert(tiny("qwen3"), mode, quiet=True)
    assert isinstance(model.drafter, Drafter)
    recorded = [name for name, _ in mto.modelopt_state(model)["modelopt_state_dict"]]
    assert recorded == [f"mtsp_{model.drafter.config.algorithm}"]


def test_defaults_come_from_the_target() -> None:
    model = mtsp.convert(
        tiny("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "dspark", quiet=True
    )
    backbone = model.drafter.config.backbone
    assert (backbone.num_attention_heads, backbone.num_key_value_heads, backbone.head_dim) == (4, 2, 8)
    assert (backbone.intermediate_size, backbone.rope_parameters["rope_theta"]) == (48, 5e5)
    assert model.drafter.config.target_layer_ids == (1, 2, 3)
    assert model.drafter.config.mask_token_id is None
    with pytest.raises(ConfigError, match="mask_token_id is not set"):
        _ = model.drafter.mask_token_id


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"blok_size": 4}, "Did you mean 'block_size'"),
        ({"backbone": {"num_layer": 2}}, "Did you mean 'num_layers'"),
        ({"target_layer_ids": [1, 9]}, r"\[9\] are outside"),
        ({"target_layer_ids": [3, 1]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 1]}, "outside"),
        ({"num_taps": 5}, "has room for 1 to 3 taps"),
        ({"mask_token_id": 2}, "pad, bos or eos"),
        ({"mask_token_id": 500}, "no row in the target's embedding"),
        ({"mask_token": "auto"}, "mask_token is 'auto', which only the tokenizer can turn into an id"),
        ({"backbone": {"hidden_size": 64}}, "leave it unset"),
        ({"head": {"type": "vanila"}}, "Did you mean 'vanilla'"),
        ({"head": {"type": "none"}}, "with_markov"),
    ],
)
def test_bad_configs_name_field_value_and_fix(config: dict, message: str) -> None:
    model = tiny("qwen3")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=message):
        mtsp.convert(model, ("dspark", config), quiet=True)
    assert not hasattr(model, "drafter")
    assert not mto.ModeloptStateManager.is_converted(model)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_a_head_without_an_embedding_and_a_confidence_that_reads_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VanillaMarkovHead, "uses_prev_embedding", False)
    with pytest.raises(ConfigError, match=r"'vanilla' embeds no previous token: set confidence\.with_markov to false"):
        mtsp.convert(tiny(), ("dspark", SMALL), quiet=True)
    mtsp.convert(tiny(), ("dspark", {**SMALL, "confidence": {"with_markov": False}}), quiet=True)


def test_unknown_modes_and_models() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'dspark'"):
        mtsp.convert(tiny(), "dsparc", quiet=True)
    for mode in (("dspark", "x"), ("dspark",), ("dspark", {}, {}), 3, {"algorithm": "dspark", "config": "x"}):
        with pytest.raises(ConfigError, match="give a name such as 'dspark'"):
            mtsp.convert(tiny(), mode, quiet=True)
    with pytest.raises(ConfigError, match="exactly one"):
        mtsp.convert(tiny(), ["dspark", "dflash"], quiet=True)
    with pytest.raises(UnsupportedError, match="not a model that can be a target"):
        mtsp.convert(torch.nn.Linear(2, 2), "dspark", quiet=True)
    model = mtsp.convert(tiny(), "dspark", quiet=True)
    with pytest.raises(ConfigError, match="has a drafter already"):
        mtsp.convert(model, "dspark", quiet=True)


def test_unknown_scale_is_refused() -> None:
    model = tiny("llama")
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    original = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = output.logits * 3.0
        return output

    model.forward = scaled
    with pytest.raises(UnsupportedError, match="logits differ"):
        mtsp.convert(model, "dspark", quiet=True)


@pytest.mark.parametrize("mode", ["dspark", "dflash", "domino"])
def test_modelopt_save_restore(mode: str, tmp_path: object) -> None:
    model = mtsp.convert(tiny("qwen3"), (mode, {"mask_token_id": 96}), quiet=True)
    mto.save(model, f"{tmp_path}/model.pt")
    again = mto.restore(tiny("qwen3", seed=1), f"{tmp_path}/model.pt")
    assert again.drafter.config == model.drafter.config
    assert drafters_equal(again, model)


@pytest.mark.parametrize("tied", [False, True])
def test_pretrained_round_trip(tied: bool, tmp_path: object) -> None:
    mto.enable_huggingface_checkpointing()
    model = mtsp.convert(tiny("qwen3", tie_word_embeddings=tied), ("dspark", SMALL), quiet=True)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.drafter.config == model.drafter.config
    assert drafters_equal(again, model)
    assert torch.equal(again.eval()(IDS).logits, model(IDS).logits)
    assert torch.equal(again.drafter.embed(IDS), model.get_input_embeddings()(IDS))


def test_save_and_restore(tmp_path: object) -> None:
    model = mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True)
    mtsp.save(model, f"{tmp_path}/drafter")
    again = mtsp.restore(tiny("qwen3"), f"{tmp_path}/drafter")
    assert drafters_equal(again.drafter, model.drafter)
    with pytest.raises(ValueError, match="not empty"):
        mtsp.save(model, f"{tmp_path}/drafter")
    with pytest.raises(ValueError, match="another drafter"):
        mtsp.restore(mtsp.convert(tiny("qwen3"), "dspark", quiet=True), f"{tmp_path}/drafter")


def test_restoring_onto_another_target_warns(tmp_path: Path) -> None:
    path = mtsp.save(mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True), tmp_path / "drafter")
    with pytest.warns(UserWarning, match="trained for a Qwen3ForCausalLM .*this is a LlamaForCausalLM"):
        mtsp.restore(tiny("llama"), path)
    with pytest.warns(UserWarning, match="another Qwen3ForCausalLM .*embedding is not this one's"):
        mtsp.restore(tiny("qwen3", seed=1), path)
    mtsp.export(path, tmp_path / "draft", quiet=True)
    with pytest.warns(UserWarning, match="another Qwen3ForCausalLM .*embedding is not this one's"):
        mtsp.load_drafter(tmp_path / "draft", tiny("qwen3", seed=1), quiet=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mtsp.restore(tiny("qwen3"), path)
        mtsp.restore(tiny("qwen3", dtype=torch.bfloat16), path)
        mtsp.load_drafter(tmp_path / "draft", tiny("qwen3"), quiet=True)


def test_arguments_of_another_kind_are_named(tmp_path: Path) -> None:
    model = mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True)
    path = mtsp.save(model, tmp_path / "drafter")
    calls = {
        "restore(model, path)": lambda: mtsp.restore(path, model),  # type: ignore[arg-type]
        "path is None": lambda: mtsp.restore(model, None),  # type: ignore[arg-type]
        "path is 3": lambda: mtsp.save(model, 3),  # type: ignore[arg-type]
        "model_or_checkpoint is None": lambda: mtsp.export(None, tmp_path / "out"),  # type: ignore[arg-type]
        "out is None": lambda: mtsp.export(path, None),  # type: ignore[arg-type]
        "checkpoint is None": lambda: mtsp.open_checkpoint(None),  # type: ignore[arg-type]
    }
    for message, call in calls.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            call()


def test_damaged_checkpoint_is_refused(tmp_path: object) -> None:
    model = mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True)
    path = mtsp.save(model, f"{tmp_path}/drafter")
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        mtsp.restore(tiny("qwen3"), path)


def test_a_failed_restore_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True)
    path, other = mtsp.save(model, tmp_path / "drafter"), mtsp.save(model, tmp_path / "other")
    description = json.loads((other / "drafter.json").read_text())
    description["config"]["head"]["rank"] = 16
    (other / "drafter.json").write_text(json.dumps(description))
    fresh = tiny("qwen3")
    trainable = [name for name, parameter in fresh.named_parameters() if parameter.requires_grad]
    with pytest.raises(CheckpointError, match=r"markov_head\S+ is \[\d+, 6\], the config .* \[\d+, 16\]"):
        mtsp.restore(fresh, other)
    assert not hasattr(fresh, "drafter")
    assert not mto.conversion.ModeloptStateManager.is_converted(fresh)
    assert [name for name, parameter in fresh.named_parameters() if parameter.requires_grad] == trainable
    assert drafters_equal(mtsp.restore(fresh, path).drafter, model.drafter)


def test_a_failed_load_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True)
    mtsp.export(model, tmp_path / "draft", quiet=True)
    fresh = tiny("qwen3")
    monkeypatch.setattr(Drafter, "load_state_dict", None)
    with pytest.raises(TypeError):
        mtsp.load_drafter(tmp_path / "draft", fresh, quiet=True)
    monkeypatch.undo()
    assert not hasattr(fresh, "drafter")
    assert drafters_equal(mtsp.load_drafter(tmp_path / "draft", fresh, quiet=True).drafter, model.drafter)


def test_deepcopy_is_independent() -> None:
    model = mtsp.convert(tiny("qwen3"), ("dspark", SMALL), quiet=True)
    clone = copy.deepcopy(model)
    assert clone.drafter.target.model is clone
    with torch.no_grad():
        clone.get_input_embeddings().weight.zero_()
    assert clone.drafter.embed(IDS).abs().max() == 0
    assert model.drafter.embed(IDS).abs().max() > 0
