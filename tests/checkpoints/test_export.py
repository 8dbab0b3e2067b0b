import json
import os

import pytest
import torch

from modelopt_spec.checkpoints import export as export_module
from modelopt_spec.checkpoints.compare import StandIn, compare_block, draft_block, rebuild
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter, read_draft
from modelopt_spec.checkpoints.independent_reader import IndependentDraft
from modelopt_spec.checkpoints.store import save
from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoints.drafts import CASES, converted, draft_of
from tests.checkpoints.test_gguf import tokenizer_file
from tests.tiny import tiny


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "drafter_card.json"}


@pytest.mark.parametrize("case", CASES)
def test_export_and_load_are_inverse(tmp_path, case):
    model = converted(case)
    layout = "deepspec" if case == "dflash" else None
    report = export(model, tmp_path / "a", layout=layout, quiet=True)
    assert report.worst_difference < 1e-5
    assert all(c.same_tokens for c in report.comparisons)
    card = json.loads((tmp_path / "a" / "drafter_card.json").read_text())
    assert report.files == (*card["files"], "drafter_card.json")
    other = load_drafter(tmp_path / "a", tiny("llama"), quiet=True)
    assert other.drafter.config == model.drafter.config
    ours, theirs = model.drafter.state_dict(), other.drafter.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    export(other, tmp_path / "b", layout=layout, quiet=True)
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_overwriting_spares_what_is_read_and_what_is_no_drafter(tmp_path):
    model = converted("vanilla")
    save(model, tmp_path / "run" / "drafter")
    for out in (tmp_path / "run" / "drafter", tmp_path / "run"):
        with pytest.raises(CheckpointError, match="which overwriting would delete"):
            export(tmp_path / "run" / "drafter", out, overwrite=True, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    for write in (export, save):
        with pytest.raises(CheckpointError, match="something else than a drafter"):
            write(model, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    assert (tmp_path / "run" / "drafter" / "drafter.json").is_file()


def test_an_export_replaces_exports_and_no_checkpoint(tmp_path):
    model, other = converted("vanilla"), converted("vanilla", seed=1)
    checkpoint = save(model, tmp_path / "checkpoint")
    before = files(checkpoint)
    for source in (other, save(other, tmp_path / "other")):
        with pytest.raises(CheckpointError, match="which an export does not replace: name another directory"):
            export(source, checkpoint, overwrite=True, quiet=True)
    assert files(checkpoint) == before
    save(other, checkpoint, overwrite=True)
    assert files(checkpoint) != before
    for source in (model, other):
        export(source, tmp_path / "draft", overwrite=True, quiet=True)


def test_a_place_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    for write in (save, export):
        with pytest.raises(CheckpointError, match=r"file/a/b cannot be written, as .*file is a file"):
            write(converted(), tmp_path / "file" / "a" / "b")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([1], r"extra is \[1\]"),
        ({1: 2}, "a dict of names"),
        ({"loss": torch.ones(1)}, r"extra\['loss'\] is no JSON value"),
        ({"kind": "mine", "sha256": "0"}, "extra has 'kind', 'sha256', which save writes itself"),
        ({"recipe": [1]}, r"extra: recipe is \[1\], not an object"),
    ],
)
def test_entries_that_would_spoil_a_checkpoint_are_refused(tmp_path, extra, message):
    with pytest.raises(ConfigError, match=message):
        save(converted(), tmp_path / "out", extra=extra)
    assert not (tmp_path / "out").exists()


def test_files_have_the_modes_that_the_umask_grants(tmp_path):
    before = os.umask(0o022)
    try:
        model = converted("vanilla")
        export(model, tmp_path / "out", quiet=True)
        save(model, tmp_path / "checkpoint")
    finally:
        os.umask(before)
    for directory in (tmp_path / "out", tmp_path / "checkpoint"):
        assert directory.stat().st_mode & 0o777 == 0o755
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o644}


def test_headless_anchor_first_drafts_get_a_head_of_zeros(tmp_path):
    """It drafts the same, and every engine serves it but llama.cpp, which serves it as it is."""
    model = converted("dflash")
    report = export(model, tmp_path / "out", engines=["vllm", "sglang", "tensorrt_llm"], quiet=True)
    assert any("head of zeros" in note for note in report.notes)
    other = load_drafter(tmp_path / "out", tiny("llama"), quiet=True)
    assert other.drafter.config.head.type == "vanilla"
    stand_in = StandIn(32, 97)
    taps = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    blocks = [draft_block(m.drafter, taps, 3, stand_in.embed, stand_in.logits) for m in (model, other)]
    assert torch.equal(blocks[0].logits, blocks[1].logits)
    assert blocks[0].tokens == blocks[1].tokens
    with pytest.raises(UnsupportedError, match="head of zeros"):
        export(model, tmp_path / "plain", engines=["vllm"], layout="deepspec", quiet=True)
    alone = export(model, tmp_path / "alone", engines="llama_cpp", quiet=True)
    assert not any("head of zeros" in note for note in alone.notes)
    with pytest.raises(UnsupportedError, match="with a confidence head beside it"):
        export(model, tmp_path / "both", engines=["vllm", "llama.cpp"], quiet=True)


def test_a_confidence_head_without_a_correction_head_gets_one_of_zeros_too(tmp_path):
    """Its columns for the token's embedding are zeros: the confidences stay."""
    model = converted("dflash_bonus", confidence={"enabled": True, "with_markov": False})
    export(model, tmp_path / "out", engines=["vllm", "sglang", "llama.cpp"], quiet=True)
    other = load_drafter(tmp_path / "out", tiny("llama"), quiet=True)
    stand_in = StandIn(32, 97)
    taps = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    ours, theirs = (draft_block(m.drafter, taps, 3, stand_in.embed, stand_in.logits) for m in (model, other))
    assert torch.allclose(ours.confidence, theirs.confidence, atol=1e-6)
    assert ours.confidence.abs().max() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_types(tmp_path, dtype):
    model = converted()
    report = export(model, tmp_path / "out", dtype=dtype, quiet=True)
    assert report.dtype == dtype
    loaded = load_drafter(tmp_path / "out", tiny("llama"), quiet=True).drafter
    wanted = getattr(torch, dtype)
    assert loaded.dtype == wanted
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(tensor.to(wanted), loaded.state_dict()[name]), name


def test_unknown_type(tmp_path):
    with pytest.raises(ValueError, match="int4"):
        export(converted(), tmp_path / "out", dtype="int4", quiet=True)
    assert not (tmp_path / "out").exists()


def test_shards_and_index(tmp_path):
    model = converted()
    report = export(model, tmp_path / "out", max_shard_bytes=20_000, quiet=True)
    assert "model.safetensors.index.json" in report.files
    assert len(report.files) > 5
    loaded = load_drafter(tmp_path / "out", tiny("llama"), quiet=True).drafter
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_checkpoint_directory_exports_like_the_model(tmp_path):
    model = converted("rnn")
    (tmp_path / "run").mkdir()
    save(model, tmp_path / "run" / "drafter", extra={"recipe": {"metadata": {"name": "r"}}})
    (tmp_path / "run" / "report.json").write_text('{"steps": 12, "seed": 3}')
    export(tmp_path / "run" / "drafter", tmp_path / "a", quiet=True)
    export(model, tmp_path / "b", quiet=True)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    card = json.loads((tmp_path / "a" / "drafter_card.json").read_text())
    assert card["recipe"] == {"metadata": {"name": "r"}}
    assert card["training_report"]["steps"] == 12
    assert len(card["training_report"]["sha256"]) == 64


def test_card_says_what_and_where_from(tmp_path):
    export(converted(), tmp_path / "out", quiet=True)
    card = json.loads((tmp_path / "out" / "drafter_card.json").read_text())
    assert card["versions"]["torch"] == torch.__version__
    assert card["trained"]["target_layer_ids"] == [1, 2, 3]
    assert card["target"]["shape"]["hidden_size"] == 32
    assert set(card["files"]) == {"config.json", "model.safetensors"}
    assert card["proof"]["worst"] < 1e-5


def test_a_directory_in_use_is_refused(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="overwrite"):
        export(converted(), tmp_path / "out", quiet=True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    with pytest.raises(CheckpointError, match="something else than a drafter"):
        export(converted(), tmp_path / "out", overwrite=True, quiet=True)
    export(converted(), tmp_path / "other", quiet=True)
    (tmp_path / "other" / "mine").write_text("x")
    export(converted(), tmp_path / "other", overwrite=True, quiet=True)
    assert not (tmp_path / "other" / "mine").exists()


def test_nothing_appears_when_the_proof_fails(tmp_path, monkeypatch):
    """A layout that loses one number on its way to disk is caught by the independent reading."""
    write = export_module.write_draft

    def lossy(draft, plan, directory, **kwargs):
        tensors = {**draft.tensors, "norm.weight": draft.tensors["norm.weight"] * 1.01}
        return write(type(draft)(draft.config, tensors), plan, directory, **kwargs)

    monkeypatch.setattr(export_module, "write_draft", lossy)
    with pytest.raises(CheckpointError, match="does not reproduce"):
        export(converted(), tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_no_drafter_and_no_mask(tmp_path):
    with pytest.raises(CheckpointError, match="no drafter"):
        export(tiny("llama"), tmp_path / "out", quiet=True)
    with pytest.raises(CheckpointError, match="mask_token_id"):
        export(converted(mask_token_id=None), tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_the_gguf_file_is_written_along(tmp_path):
    pytest.importorskip("gguf")
    target = tokenizer_file(tmp_path / "target.gguf", 97)
    report = export(converted(), tmp_path / "out", gguf=target, quiet=True)
    assert "draft.gguf" in report.files
    card = json.loads((tmp_path / "out" / "drafter_card.json").read_text())
    assert card["files"]["draft.gguf"] == sha256_of(tmp_path / "out" / "draft.gguf")
    with pytest.raises(UnsupportedError, match="rnn"):
        export(converted("rnn"), tmp_path / "rnn", gguf=target, quiet=True)
    assert not (tmp_path / "rnn").exists()


def test_engines_refuse_before_anything_is_written(tmp_path):
    with pytest.raises(UnsupportedError, match=r"'gated' head.*[Dd]istill"):
        export(converted("gated"), tmp_path / "out", engines=["vllm"], quiet=True)
    with pytest.raises(UnsupportedError, match="Did you mean 'vllm'"):
        export(converted(), tmp_path / "out", engines=["vlm"], quiet=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("rope base", lambda c: c.update(rope_theta=2e4, rope_parameters={"rope_type": "default", "rope_theta": 2e4})),
        ("eps", lambda c: c.update(rms_norm_eps=1e-2)),
        ("mask id", lambda c: (c.update(mask_token_id=5), c["dflash_config"].update(mask_token_id=5))),
        ("causality", lambda c: (c.update(is_causal=True), c["dflash_config"].update(causal=True))),
        ("window", lambda c: c.update(sliding_window=4, layer_types=["sliding_attention"] * 3, is_causal=False)),
        ("head", lambda c: c.update(markov_rank=0)),
        ("confidence", lambda c: c.update(enable_confidence_head=False)),
        ("anchor layout", lambda c: c.update(sample_from_anchor=False)),
    ],
)
def test_the_independent_reader_sees_every_key(tmp_path, what, change):
    """Changing one key in the written config moves what the independent reader computes."""
    model = converted()
    export(model, tmp_path / "out", quiet=True)
    draft = draft_of(model)
    stand_in = StandIn(32, 97)
    taps = torch.randn(12, 96, generator=torch.Generator().manual_seed(3))

    def compare():
        reader = IndependentDraft.open(tmp_path / "out")
        return compare_block(rebuild(draft), reader, taps, 7, stand_in.embed, stand_in.logits)

    assert compare().worst < 1e-5
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    assert compare().worst > 1e-3


def test_contradictions_are_refused_unless_accepted(tmp_path):
    export(converted(), tmp_path / "out", quiet=True)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["target_layer_ids"] = [0, 2, 3]
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"contradicts itself.*target_layer_ids"):
        read_draft(tmp_path / "out")
    imported = read_draft(tmp_path / "out", allow_contradictions=True)
    assert imported.draft.config.target_layer_ids == (1, 2, 3)
    assert "contradicts" in imported.account.overruled[0]


def test_wrong_target(tmp_path):
    export(converted(), tmp_path / "out", quiet=True)
    with pytest.raises(CheckpointError, match="vocabulary 97"):
        load_drafter(tmp_path / "out", tiny("llama", vocab_size=90), quiet=True)
    with pytest.raises(CheckpointError, match="number of layers 6"):
        load_drafter(tmp_path / "out", tiny("llama", num_hidden_layers=8), quiet=True)
    with pytest.raises(CheckpointError, match="hidden size 32"):
        load_drafter(tmp_path / "out", tiny("llama", hidden_size=40), quiet=True)


def test_domino_for_sglang_is_written_in_the_one_type_that_serves_it(tmp_path):
    model = converted("domino")
    export(model, tmp_path / "out", engines=["sglang"], quiet=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(UnsupportedError, match="bfloat16 only"):
        export(model, tmp_path / "other", engines=["sglang"], dtype="float32", quiet=True)
