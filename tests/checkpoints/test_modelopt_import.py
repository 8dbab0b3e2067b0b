"""Drafts that nvidia-modelopt made itself, with its own convert and exporter: we read and compute what it computes."""

import contextlib
import io
import json

import pytest
import torch

from modelopt_spec.checkpoints.compare import draft_block
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter, read_draft
from modelopt_spec.checkpoints.independent_reader import IndependentDraft
from modelopt_spec.errors import CheckpointError
from tests.checkpoints.drafts import randomise
from tests.tiny import tiny

KINDS = {
    "vanilla": {
        "projector_type": "dspark",
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "use_confidence_head": True,
    },
    "gated": {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "gated"},
    "rnn": {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": "rnn", "use_confidence_head": True},
    "dflash": {},
    "domino": {
        "projector_type": "domino",
        "emb_dim": 6,
        "gru_hidden_dim": 10,
        "pure_draft_prefix_len": 1,
        "shift_label": True,
    },
}
SHAPE = {
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def made(kind, *, rope_theta=10000.0, **settings):
    """A tiny target that nvidia-modelopt converted, with random draft weights."""
    import modelopt.torch.opt as mto
    import modelopt.torch.speculative as speculative

    mto.enable_huggingface_checkpointing()
    model = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": rope_theta})
    config = {
        "dflash_block_size": 5,
        "dflash_mask_token_id": 96,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": {**SHAPE, **KINDS[kind]},
        **settings,
    }
    speculative.convert(model, [("dflash", config)])
    randomise(model.dflash_module)
    return model.eval()


def exported(model, directory):
    with contextlib.redirect_stdout(io.StringIO()):
        model.get_exporter().export(directory)
    return directory


@torch.no_grad()
def its_own_block(model, ids, previous):
    """Hidden states and corrected logits of one block after ``ids``, from nvidia-modelopt's own modules.

    ids: the context and, last, the anchor. previous: the token before each slot.
    """
    module, block = model.dflash_module, 5
    states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[i + 1] for i in model.target_layer_ids], dim=-1)[:, :-1]
    draft_ids = torch.tensor([[int(ids[0, -1])] + [96] * (block - 1)])
    embedded = model.get_input_embeddings()(draft_ids)
    positions = torch.arange(taps.shape[1] + block).unsqueeze(0)
    hidden = module(embedded, taps, positions, model._build_generate_swa_mask(taps.shape[1], 1, embedded.dtype, None))
    logits = model.lm_head(hidden)
    if hasattr(module, "compute_markov_bias"):
        logits = logits + module.compute_markov_bias(torch.tensor([[previous]]), hidden.unsqueeze(1)).squeeze(1)
    return taps[0], hidden[0], logits[0]


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_reads_and_computes_what_modelopt_computes(tmp_path, kind, raw):
    theirs = made(kind)
    if raw:
        theirs.save_pretrained(tmp_path / "src")
    else:
        exported(theirs, tmp_path / "src")
    target = tiny("llama")
    load_drafter(tmp_path / "src", target, quiet=True)
    ids = torch.randint(3, 90, (1, 14), generator=torch.Generator().manual_seed(0))
    drafter = target.drafter
    taps = drafter.target.features(ids, drafter.config.target_layer_ids).taps[0, :-1]
    ours = draft_block(drafter, taps, int(ids[0, -1]), target.get_input_embeddings(), target.lm_head)
    previous = [int(ids[0, -1]), *ours.tokens]
    slots = previous[:5] if kind != "dflash" else None
    their_taps, their_hidden, their_logits = its_own_block(theirs, ids, slots)
    assert torch.allclose(taps, their_taps, atol=1e-5)
    assert torch.allclose(ours.hidden, their_hidden, atol=1e-5)
    if kind == "dflash":
        assert ours.tokens == their_logits[1:].argmax(-1).tolist()
    elif kind != "domino":
        assert torch.allclose(ours.logits, their_logits, atol=1e-5)
    if kind in ("vanilla", "rnn"):
        confidence = theirs.dflash_module.compute_confidence_logits(torch.tensor([[slots]]), their_hidden[None, None])
        assert torch.allclose(ours.confidence, confidence[0, 0], atol=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "dflash", "domino"])
def test_becomes_a_directory_that_engines_load(tmp_path, kind):
    exported(made(kind), tmp_path / "src")
    target = load_drafter(tmp_path / "src", tiny("llama"), quiet=True)
    engines = {
        "vanilla": ["vllm", "llama.cpp", "sglang"],
        "dflash": ["vllm", "llama.cpp", "sglang"],
        "domino": ["sglang"],
    }
    dtype = "bfloat16" if kind == "domino" else None
    report = export(target, tmp_path / "out", engines=engines[kind], dtype=dtype, quiet=True)
    assert report.layout == {"vanilla": "deepspec", "dflash": "zlab", "domino": "domino"}[kind]
    assert IndependentDraft.open(tmp_path / "out").block_size == 5


def test_window_causality_and_sinks(tmp_path):
    theirs = made("vanilla", dflash_swa_window_size=7, dflash_draft_attention="causal", dflash_attention_sink=True)
    exported(theirs, tmp_path / "src")
    backbone = read_draft(tmp_path / "src").draft.config.backbone
    assert (backbone.sliding_window, backbone.causal, backbone.attention_sink) == (7, True, True)
    assert backbone.window_rule == "query"


def test_exported_rope_base_is_not_what_its_training_used(tmp_path):
    """nvidia-modelopt 0.47 with transformers 5 rotates the draft with base 10000 and exports the target's base.

    The exported file cannot be told from a right one, so it is read as it says; the training checkpoint records the
    versions, and is read as it was trained. ``overrides`` corrects an exported one.
    """
    theirs = made("vanilla", rope_theta=500000.0)
    assert theirs.dflash_config.rope_parameters["rope_theta"] == 10000.0
    exported(theirs, tmp_path / "exported")
    theirs.save_pretrained(tmp_path / "raw")
    as_written = read_draft(tmp_path / "exported").draft.config.backbone.rope_parameters
    as_trained = read_draft(tmp_path / "raw").draft.config.backbone.rope_parameters
    assert as_written["rope_theta"] == 500000.0
    assert as_trained["rope_theta"] == 10000.0
    corrected = read_draft(tmp_path / "exported", overrides={"backbone.rope_parameters": as_trained})
    assert corrected.draft.config.backbone.rope_parameters == as_trained


def test_training_checkpoint_needs_its_recorded_conversion(tmp_path):
    made("vanilla").save_pretrained(tmp_path)
    (tmp_path / "modelopt_state.pth").unlink()
    with pytest.raises(CheckpointError, match=r"modelopt_state.pth does not exist"):
        read_draft(tmp_path)
    torch.save({"modelopt_state_dict": [("quantize", {})]}, tmp_path / "modelopt_state.pth")
    with pytest.raises(CheckpointError, match="no dflash conversion"):
        read_draft(tmp_path)


def test_recorded_conversion_is_not_executed(tmp_path):
    import pickle

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    made("vanilla").save_pretrained(tmp_path)
    (tmp_path / "modelopt_state.pth").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="refused"):
        read_draft(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_its_own_keys_stay_in_its_layout(tmp_path):
    exported(made("vanilla"), tmp_path / "src")
    target = load_drafter(tmp_path / "src", tiny("llama"), quiet=True)
    export(target, tmp_path / "back", layout="modelopt", quiet=True)
    theirs = json.loads((tmp_path / "src" / "config.json").read_text())
    ours = json.loads((tmp_path / "back" / "config.json").read_text())
    for key, value in theirs["dflash_config"].items():
        assert ours["dflash_config"][key] == value, key
    differing = {k for k, v in theirs.items() if k != "dflash_config" and ours.get(k) != v}
    assert differing <= {"initializer_range"}
