import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelopt_spec.checkpoints import safe_read
from modelopt_spec.checkpoints.safe_read import read_header, read_json, read_tensors, tensor_entries
from modelopt_spec.errors import CheckpointError


def raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


class Bomb:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


# ---- JSON ----


def test_json_object(tmp_path):
    (tmp_path / "c.json").write_text('{"a": {"b": 1}}')
    assert read_json(tmp_path / "c.json") == {"a": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "'a' stands there twice"),
        ('{"x": {"a": 1, "a": 1}}', "'a' stands there twice"),
        ("[1]", "not a JSON object"),
        ('{"a": ', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_json_refused(tmp_path, text, message):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_json(tmp_path / "c.json")


def test_json_too_large(tmp_path):
    (tmp_path / "c.json").write_text('{"a": "' + "x" * 200 + '"}')
    with pytest.raises(CheckpointError, match="more than the 100"):
        read_json(tmp_path / "c.json", limit=100)


# ---- one safetensors file ----


def test_header_without_reading_data(tmp_path):
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.ones(4)}, tmp_path / "model.safetensors")
    entries = read_header(tmp_path / "model.safetensors")
    assert {(e.name, e.dtype, e.shape) for e in entries.values()} == {("a", "BF16", (2, 3)), ("b", "F32", (4,))}


def test_truncated_at_any_place(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(100.0)}, path)
    whole = path.read_bytes()
    for size in (0, 4, 8, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_header(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        read_header(path)


def test_huge_header_is_not_allocated(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="header claims"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            8,
            "twice",
        ),
        (json.dumps({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}).encode(), 6, "start at 2"),
        (json.dumps({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}).encode(), 12, "start at 8"),
        (json.dumps({"a": entry([2], 0, 4)}).encode(), 4, "does not fit"),
        (json.dumps({"a": entry([-1], 0, 4)}).encode(), 4, "malformed"),
        (json.dumps({"a": entry([1], 0, 4, "Q9")}).encode(), 4, "unknown type"),
        (json.dumps({"a": 3}).encode(), 0, "malformed"),
        (json.dumps({"a": entry([1 << 40, 1 << 40], 0, 4)}).encode(), 4, "does not fit"),
    ],
)
def test_bad_headers(tmp_path, header, size, message):
    with pytest.raises(CheckpointError, match=message):
        read_header(raw(tmp_path / "model.safetensors", header, b"\0" * size))


# ---- a directory ----


def shards(tmp_path, weight_map=None):
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    mapping = {"a": "model-1.safetensors", "b": "model-2.safetensors"} if weight_map is None else weight_map
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapping}))
    return tmp_path


def test_shards(tmp_path):
    tensors = read_tensors(shards(tmp_path))
    assert tensors["a"].tolist() == [0, 0]
    assert tensors["b"].tolist() == [1, 1, 1]
    assert list(read_tensors(tmp_path, ["b"])) == ["b"]


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "c:x.safetensors", "", ".."],
)
def test_index_cannot_leave_its_directory(tmp_path, name):
    save_file({"a": torch.zeros(2)}, tmp_path.parent / "x.safetensors")
    with pytest.raises(CheckpointError, match="same directory"):
        tensor_entries(shards(tmp_path, {"a": "model-1.safetensors", "b": name}))


def test_index_cannot_name_a_pickle(tmp_path):
    with pytest.raises(CheckpointError, match="same directory"):
        tensor_entries(shards(tmp_path, {"a": "model-1.safetensors", "b": "pytorch_model.bin"}))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"a": "model-2.safetensors", "b": "model-2.safetensors"}, "but it is not"),
        ({"a": "model-1.safetensors"}, None),
        ({"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}, "'c'"),
        ({"a": "model-1.safetensors", "b": "model-3.safetensors"}, "does not exist"),
        ({"a": 3}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_index_must_agree_with_the_shards(tmp_path, mapping, message):
    shards(tmp_path, mapping)
    if message is None:
        assert set(tensor_entries(tmp_path)) == {"a"}
        return
    with pytest.raises(CheckpointError, match=message):
        tensor_entries(tmp_path)


def test_tensor_in_two_shards(tmp_path):
    shards(tmp_path)
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="in both"):
        tensor_entries(tmp_path)


def test_unlisted_tensor(tmp_path):
    shards(tmp_path)
    save_file({"b": torch.ones(3), "extra": torch.ones(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="extra"):
        tensor_entries(tmp_path)


def test_two_sources(tmp_path):
    shards(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="stale"):
        tensor_entries(tmp_path)


def test_pickle_is_never_read(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    with pytest.raises(CheckpointError, match="pickles"):
        tensor_entries(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_renamed_pickle(tmp_path, zipped):
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"not a safetensors file|header claims"):
        tensor_entries(tmp_path)
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    with pytest.raises(CheckpointError):
        tensor_entries(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model.safetensors"):
        tensor_entries(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        tensor_entries(tmp_path / "nothing")
    save_file({"a": torch.zeros(1)}, tmp_path / "odd_name.safetensors")
    assert set(tensor_entries(tmp_path)) == {"a"}
    save_file({"a": torch.zeros(1)}, tmp_path / "second.safetensors")
    with pytest.raises(CheckpointError, match="2 safetensors files"):
        tensor_entries(tmp_path)
    assert safe_read.torch_dtype("BF16") is torch.bfloat16
