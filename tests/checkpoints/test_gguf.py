"""The GGUF file of a draft: keys, names, types and tokenizer. tests/engines compares it with the converter's own."""

from pathlib import Path

import numpy as np
import pytest
import torch

from modelopt_spec.checkpoints.engines import ExportPlan
from modelopt_spec.checkpoints.engines.llama_cpp_gguf import write_gguf
from modelopt_spec.checkpoints.export import write_draft
from modelopt_spec.checkpoints.layouts import get_layout
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.errors import CheckpointError, UnsupportedError
from tests.checkpoints.drafts import cached_draft

gguf = pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def target_gguf(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "target.gguf"
    return tokenizer_file(path, 97)


def tokenizer_file(path, size):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(size)])
    writer.add_array("tokenizer.ggml.token_type", [1] * size)
    writer.add_uint32("tokenizer.ggml.mask_token_id", 3)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def draft_directory(path, case="vanilla", layout="deepspec"):
    draft = cached_draft(case)
    path.mkdir(exist_ok=True)
    write_draft(draft, ExportPlan(draft.config, get_layout(layout), (), {}), path)
    return path


def read(path):
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def test_keys_and_tokenizer(tmp_path, target_gguf):
    fields, tensors = read(write_gguf(draft_directory(tmp_path / "d"), target_gguf, tmp_path / "draft.gguf"))
    assert fields["general.architecture"] == "dflash"
    assert fields["dflash.target_layers"] == [2, 3, 4]
    assert fields["dflash.block_size"] == 5
    assert fields["dflash.sample_from_anchor"] is True
    assert fields["dflash.attention.causal"] is False
    assert fields["dflash.rope.freq_base"] == 10000.0
    assert fields["tokenizer.ggml.mask_token_id"] == 96
    assert fields["tokenizer.ggml.eos_token_id"] == 2
    assert len(fields["tokenizer.ggml.tokens"]) == 97
    assert "dflash.rope.scaling.type" not in fields
    assert len(tensors) == len(cached_draft().tensors)


@pytest.mark.parametrize("file_type", ["f32", "f16", "bf16"])
def test_tensors(tmp_path, target_gguf, file_type):
    _, tensors = read(write_gguf(draft_directory(tmp_path / "d"), target_gguf, tmp_path / "g", file_type=file_type))
    ours = cached_draft().tensors
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[file_type]
    for theirs, name in (
        ("blk.1.attn_q.weight", "layers.1.self_attn.q_proj.weight"),
        ("markov_w2.weight", "markov_head.markov_w2.weight"),
    ):
        held = gguf.quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert np.array_equal(held, ours[name].to(dtype).float().numpy())
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert tensors["conf_proj.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_reduced_vocabulary_is_absolute(tmp_path, target_gguf):
    _, tensors = read(write_gguf(draft_directory(tmp_path / "d", "reduced"), target_gguf, tmp_path / "g"))
    table = cached_draft("reduced").tensors["d2t"]
    assert tensors["d2t"].data.tolist() == (table + torch.arange(40)).tolist()
    assert list(tensors["output.weight"].shape) == [32, 40]


def test_window_scaling_and_scales(tmp_path, target_gguf):
    fields, _ = read(write_gguf(draft_directory(tmp_path / "w", "window"), target_gguf, tmp_path / "w.gguf"))
    assert fields["dflash.attention.sliding_window"] == 9
    assert fields["dflash.attention.sliding_window_pattern"] == [True] * 3
    assert fields["dflash.attention.causal"] is True
    scaled = TargetFacts(embedding_scale=5.5, logit_softcapping=30.0, logit_scale=0.5, known=True)
    directory = draft_directory(tmp_path / "y", "yarn")
    fields, _ = read(write_gguf(directory, target_gguf, tmp_path / "y.gguf", target=scaled))
    assert fields["dflash.rope.scaling.type"] == "yarn"
    assert fields["dflash.rope.scaling.factor"] == 4.0
    assert fields["dflash.rope.scaling.original_context_length"] == 64
    assert fields["dflash.embedding_scale"] == 5.5
    assert fields["dflash.final_logit_softcapping"] == 30.0
    assert fields["dflash.logit_scale"] == 0.5


def test_bonus_anchor(tmp_path, target_gguf):
    fields, tensors = read(
        write_gguf(draft_directory(tmp_path / "d", "dflash_bonus", "zlab"), target_gguf, tmp_path / "g")
    )
    assert "dflash.sample_from_anchor" not in fields
    assert "markov_w1.weight" not in tensors


def test_any_layout_that_is_read_can_be_written(tmp_path, target_gguf):
    fields, _ = read(write_gguf(draft_directory(tmp_path / "d", "vanilla", "modelopt"), target_gguf, tmp_path / "g"))
    assert fields["dflash.sample_from_anchor"] is True


def test_refused(tmp_path, target_gguf):
    with pytest.raises(UnsupportedError, match="'gated' head"):
        write_gguf(draft_directory(tmp_path / "g", "gated"), target_gguf, tmp_path / "out.gguf")
    with pytest.raises(UnsupportedError, match="llama3"):
        write_gguf(draft_directory(tmp_path / "l", "llama3"), target_gguf, tmp_path / "out.gguf")
    directory = draft_directory(tmp_path / "v")
    with pytest.raises(UnsupportedError, match="file_type"):
        write_gguf(directory, target_gguf, tmp_path / "out.gguf", file_type="q4_0")
    with pytest.raises(CheckpointError, match="does not exist"):
        write_gguf(directory, tmp_path / "nothing.gguf", tmp_path / "out.gguf")
    with pytest.raises(CheckpointError, match="90 tokens"):
        write_gguf(directory, tokenizer_file(tmp_path / "other.gguf", 90), tmp_path / "out.gguf")
    (tmp_path / "noise.gguf").write_bytes(b"noise" * 100)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        write_gguf(directory, tmp_path / "noise.gguf", tmp_path / "out.gguf")
    assert not [p for p in tmp_path.iterdir() if "out.gguf" in p.name]
