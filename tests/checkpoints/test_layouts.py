"""Every layout: writing and reading are inverse, and the independent reader computes the same from its files."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_spec.checkpoints.engines import ExportPlan
from modelopt_spec.checkpoints.export import export, prove, write_draft
from modelopt_spec.checkpoints.files import write_tensors
from modelopt_spec.checkpoints.importing import canonical, import_checkpoint, load_drafter, read_draft
from modelopt_spec.checkpoints.layouts import LAYOUTS, get_layout
from modelopt_spec.checkpoints.store import restore
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoints.drafts import CASES, cached_draft
from tests.tiny import tiny

TARGET = TargetFacts(name="some/target", known=True)
PAIRS = [(layout, case) for layout in LAYOUTS for case in CASES]


def written(tmp_path, layout, case="vanilla"):
    draft = cached_draft(case)
    plan = ExportPlan(draft.config, get_layout(layout), (), {})
    tmp_path.mkdir(exist_ok=True)
    write_draft(draft, plan, tmp_path, target=TARGET)
    return draft


def edit(directory, change):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(("layout", "case"), PAIRS)
def test_writing_and_reading_are_inverse(tmp_path, layout, case):
    draft = cached_draft(case)
    reason = get_layout(layout).refuses(draft.config)
    if reason is not None:
        with pytest.raises(UnsupportedError, match=layout):
            get_layout(layout).check(draft.config)
        return
    written(tmp_path / "a", layout, case)
    prove(draft, tmp_path / "a")
    imported = read_draft(tmp_path / "a")
    assert imported.layout.name == layout
    assert canonical(imported.draft.config) == canonical(draft.config)
    assert set(imported.draft.tensors) == set(draft.tensors)
    assert all(torch.equal(imported.draft.tensors[name], draft.tensors[name]) for name in draft.tensors)
    assert not imported.account.overruled
    plan = ExportPlan(imported.draft.config, imported.layout, (), {})
    (tmp_path / "b").mkdir()
    write_draft(imported.draft, plan, tmp_path / "b", target=TARGET)
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    ours, theirs = (load_file(tmp_path / d / "model.safetensors") for d in "ab")
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


ELSEWHERE = {"deepseek_v4", "deepspec_gemma4"}
"""Layouts whose drafts are not among these cases; they have tests of their own."""


def test_every_layout_holds_something():
    for name, layout in LAYOUTS.items():
        held = [case for case in CASES if layout.refuses(cached_draft(case).config) is None]
        assert held or name in {"modelopt_training", *ELSEWHERE}, name


@pytest.mark.parametrize("layout", ["deepspec", "speculators", "zlab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_and_types(tmp_path, layout, dtype):
    draft = written(tmp_path, layout, "dflash_bonus")
    tensors = {n: t.to(dtype) for n, t in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    assert len(write_tensors(tensors, tmp_path, max_shard_bytes=8_000)) > 4
    imported = read_draft(tmp_path)
    assert imported.draft.dtype == dtype
    for name, tensor in draft.tensors.items():
        assert torch.equal(imported.draft.tensors[name], tensor.to(dtype))


def test_account_lists_every_key_and_tensor(tmp_path):
    written(tmp_path, "specforge")
    edit(tmp_path, lambda c: c.update(my_own_key=3, transformers_version="5.0"))
    account = read_draft(tmp_path).account
    fates = {entry.name: entry.fate for entry in account.keys}
    assert fates["my_own_key"] == "ignored"
    assert fates["dflash_config.markov_rank"] == "renamed"
    assert fates["hidden_size"] == "used"
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in config.items():
        if key in ("rope_parameters", "rope_scaling"):
            assert key in fates
        elif isinstance(value, dict):
            assert all(f"{key}.{inner}" in fates for inner in value)
        else:
            assert key in fates, key
    assert {entry.name for entry in account.tensors} == set(load_file(tmp_path / "model.safetensors"))
    json.dumps(account.to_dict())


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_missing_tensor(tmp_path):
    written(tmp_path, "deepspec")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["markov_head.markov_w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*markov_w2"):
        read_draft(tmp_path)


def test_unknown_tensor(tmp_path):
    written(tmp_path, "deepspec")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["markov_head.gate_projection.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"belong to no part.*gate_projection"):
        read_draft(tmp_path)
    imported = read_draft(tmp_path, ignore_unknown=True)
    assert "gate_projection" in imported.account.overruled[0]


def test_a_head_that_the_config_does_not_mention_is_not_dropped_in_silence(tmp_path):
    """What SGLang does with nvidia-modelopt's drafts: load the backbone, leave the head out."""
    written(tmp_path, "modelopt")
    edit(tmp_path, lambda c: c["dflash_config"].pop("projector_type"))
    edit(tmp_path, lambda c: c["dflash_config"].pop("markov_rank"))
    with pytest.raises(CheckpointError, match=r"markov_w1|no known layout"):
        read_draft(tmp_path)


def test_wrong_shape(tmp_path):
    written(tmp_path, "deepspec")
    edit(tmp_path, lambda c: c.update(markov_rank=7))
    with pytest.raises(CheckpointError, match=r"has shape .* asks for"):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("layout", "case", "change", "message"),
    [
        ("deepspec", "vanilla", lambda c: c["dflash_config"].update(mask_token_id=3), "mask_token_id"),
        ("deepspec", "vanilla", lambda c: c["dflash_config"].update(shift_label=False), "shift_label"),
        ("deepspec", "vanilla", lambda c: c["dflash_config"].update(causal=True), "causal"),
        ("deepspec", "vanilla", lambda c: c.update(rope_theta=5.0), "rope_theta"),
        ("zlab", "sink", lambda c: c.update(sliding_window=7), "sliding_window"),
        ("domino", "domino", lambda c: c.update(emb_dim=7), "emb_dim"),
        ("nemotron", "vanilla", lambda c: c.update(target_layer_ids=[0, 1, 2]), "contradict"),
        ("speculators", "vanilla", lambda c: c.update(block_size=6), "speculative_tokens"),
        (
            "deepspec",
            "yarn",
            lambda c: c["rope_scaling"].update(factor=2.0),
            "rope_scaling",
        ),
    ],
)
def test_contradictions(tmp_path, layout, case, change, message):
    written(tmp_path, layout, case)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        read_draft(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("block_size"), "lacks block_size"),
        (lambda c: (c.pop("target_layer_ids"), c["dflash_config"].pop("target_layer_ids")), "lacks target_layer_ids"),
        (lambda c: c.update(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (lambda c: c.update(is_neox_style=False), "interleaved"),
        (lambda c: c["dflash_config"].update(attention_value_scale=2.0), "attention_value_scale"),
        (lambda c: c.update(layer_types=["full_attention", "sliding_attention", "full_attention"]), "mixes"),
        (lambda c: c.update(layer_types=["full_attention"]), "does not name 3"),
        (lambda c: c.update(block_size="five"), "not usable"),
        (lambda c: c.update(block_size=True), "not a number"),
        (lambda c: c.update(target_layer_ids=[1, 2.5, 3]), "not usable"),
        (lambda c: c.update(enable_confidence_head="yes"), "not true or false"),
        (lambda c: c.update(architectures=["LlamaForCausalLM"]), "no known layout"),
        (lambda c: c.update(markov_head_type="transformer"), "not a registered"),
    ],
)
def test_unusable_keys(tmp_path, change, message):
    written(tmp_path, "deepspec")
    edit(tmp_path, change)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        read_draft(tmp_path)


def test_mask_embedding_is_not_lost_in_silence(tmp_path):
    written(tmp_path, "zlab", "dflash_bonus")
    (tmp_path / "mask_embedding.pt").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match="mask_embedding"):
        read_draft(tmp_path)
    account = read_draft(tmp_path, ignore_unknown=True).account
    assert account.files[0].name == "mask_embedding.pt"


def test_own_embedding_must_be_the_targets(tmp_path):
    written(tmp_path, "deepspec")
    target = tiny("llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    load_drafter(tmp_path, target, quiet=True)
    tensors["embed_tokens.weight"] = torch.randn(97, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="its own embed_tokens"):
        load_drafter(tmp_path, tiny("llama"), quiet=True)
    load_drafter(tmp_path, tiny("llama"), ignore_unknown=True, quiet=True)


def test_arguments_of_another_kind_are_named(tmp_path):
    target = tiny("llama")
    with pytest.raises(ConfigError, match=r"they are swapped, call load_drafter\(path, model\)"):
        load_drafter(target, tmp_path)
    with pytest.raises(ConfigError, match="a NoneType as model: call load_drafter"):
        load_drafter(tmp_path, None)


def test_overrides(tmp_path):
    written(tmp_path, "deepspec")
    imported = read_draft(tmp_path, overrides={"mask_token_id": 5, "backbone.rms_norm_eps": 1e-5})
    assert imported.draft.config.mask_token_id == 5
    assert imported.draft.config.backbone.rms_norm_eps == 1e-5
    assert len(imported.account.overruled) == 2
    with pytest.raises(ConfigError, match=r"backbone.rms_norm_eps"):
        read_draft(tmp_path, overrides={"backbone.rms_norm_epsilon": 1e-5})


def test_import_writes_a_checkpoint_that_restores_and_exports(tmp_path):
    draft = written(tmp_path / "src", "specforge", "rnn")
    account = import_checkpoint(tmp_path / "src", tiny("llama"), tmp_path / "ours", quiet=True)
    assert account.layout == "specforge"
    model = restore(tiny("llama"), tmp_path / "ours")
    for name, tensor in draft.tensors.items():
        assert torch.equal(model.drafter.state_dict()[name], tensor)
    report = export(tmp_path / "ours", tmp_path / "out", engines=["sglang"], quiet=True)
    assert report.layout == "deepspec"


def test_old_specforge_names(tmp_path):
    draft = written(tmp_path, "specforge")
    tensors = load_file(tmp_path / "model.safetensors")
    moved = {f"logit_head.{n}" if n.startswith(("markov", "confidence")) else n: t for n, t in tensors.items()}
    save_file(moved, tmp_path / "model.safetensors")
    imported = read_draft(tmp_path)
    assert all(torch.equal(imported.draft.tensors[name], draft.tensors[name]) for name in draft.tensors)
