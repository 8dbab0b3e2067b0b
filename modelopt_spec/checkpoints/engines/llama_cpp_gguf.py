"""A draft as a GGUF file, without llama.cpp's converter: its keys and names, the tokenizer of the target's GGUF.

Needs the ``gguf`` package. What the converter writes for the same directory is the same, key by key, byte by byte.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.checkpoints.engines.base import Serving
from modelopt_spec.checkpoints.engines.llama_cpp import LlamaCpp
from modelopt_spec.checkpoints.importing import Imported, read_draft
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import BackboneConfig
from modelopt_spec.conventions import BlockLayout, aux_layer_id
from modelopt_spec.errors import CheckpointError, UnsupportedError

__all__ = ["FILE_TYPES", "write_gguf"]

ARCH = "dflash"
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32}
"""Type of the matrices -> ``general.file_type``; vectors stay float32."""

_NAMES = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def write_gguf(
    directory: str | os.PathLike[str],
    target_gguf: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    file_type: str = "f32",
    target: TargetFacts | None = None,
) -> Path:
    """Write the GGUF file of a draft directory.

    Args:
        directory: a draft in any layout that this package reads.
        target_gguf: the target's GGUF file, whose tokenizer the draft shares.
        out: the file to write; it appears complete or not at all.
        file_type: ``f32``, ``f16`` or ``bf16`` for the matrices.
        target: how the target scales; None takes it from the directory's card.

    Raises:
        UnsupportedError: llama.cpp does not serve this drafter, the ``gguf`` package is missing, or an unknown type.
        CheckpointError: ``target_gguf`` has no tokenizer or another vocabulary.
    """
    if file_type not in FILE_TYPES:
        raise UnsupportedError(f"file_type is {file_type!r}: use one of {', '.join(FILE_TYPES)}")
    gguf = _package()
    imported = read_draft(directory)
    facts = target if target is not None else _facts_of(Path(directory))
    reason = LlamaCpp().refuses(Serving(imported.draft.config, imported.layout.name, imported.draft.dtype, facts))
    if reason is not None and "does not read layout" not in reason:
        raise UnsupportedError(f"llama.cpp: {reason}")
    final = Path(out)
    final.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{final.name}.partial-", dir=final.parent)
    os.close(handle)
    try:
        writer = gguf.GGUFWriter(partial, ARCH)
        _write_keys(gguf, writer, imported, facts, file_type, final.stem)
        _copy_tokenizer(gguf, writer, Path(target_gguf), imported.draft.config.vocab_size or 0)
        writer.add_uint32("tokenizer.ggml.mask_token_id", imported.draft.config.mask_token_id)
        _write_tensors(gguf, writer, imported, file_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(partial, final)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    return final


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise UnsupportedError(
            "writing GGUF needs the gguf package: pip install 'modelopt-spec[demo]', or convert the exported directory "
            "with llama.cpp's convert_hf_to_gguf.py"
        ) from None
    return gguf


def _facts_of(directory: Path) -> TargetFacts:
    from modelopt_spec.checkpoints.card import read_card

    return TargetFacts.from_card((read_card(directory) or {}).get("target", {}))


def _write_keys(gguf: Any, writer: Any, imported: Imported, facts: TargetFacts, file_type: str, name: str) -> None:
    """Metadata as the converter writes it."""
    config, backbone = imported.draft.config, imported.draft.config.backbone
    writer.add_type("model")
    writer.add_name(name)
    writer.add_uint32(f"{ARCH}.block_count", backbone.num_layers)
    writer.add_uint32(f"{ARCH}.context_length", backbone.max_position_embeddings)
    writer.add_uint32(f"{ARCH}.embedding_length", backbone.hidden_size)
    writer.add_uint32(f"{ARCH}.feed_forward_length", backbone.intermediate_size)
    writer.add_uint32(f"{ARCH}.attention.head_count", backbone.num_attention_heads)
    writer.add_uint32(f"{ARCH}.attention.head_count_kv", backbone.num_key_value_heads)
    writer.add_bool(f"{ARCH}.attention.causal", backbone.causal)
    writer.add_float32(f"{ARCH}.attention.layer_norm_rms_epsilon", backbone.rms_norm_eps)
    writer.add_uint32(f"{ARCH}.attention.key_length", backbone.head_dim)
    writer.add_uint32(f"{ARCH}.attention.value_length", backbone.head_dim)
    _write_rope(writer, backbone)
    if backbone.sliding_window is not None:
        writer.add_uint32(f"{ARCH}.attention.sliding_window", backbone.sliding_window)
        writer.add_array(f"{ARCH}.attention.sliding_window_pattern", [True] * (backbone.num_layers or 0))
    for key, value, neutral in (
        ("embedding_scale", facts.embedding_scale, 1.0),
        ("logit_scale", facts.logit_scale, 1.0),
        ("final_logit_softcapping", facts.logit_softcapping, None),
    ):
        if value != neutral:
            writer.add_float32(f"{ARCH}.{key}", value)
    writer.add_file_type(FILE_TYPES[file_type])
    writer.add_uint32(f"{ARCH}.block_size", config.block_size)
    writer.add_array(f"{ARCH}.target_layers", [aux_layer_id(i) for i in config.target_layer_ids or ()])
    if imported.layout.name != "zlab":
        writer.add_bool(f"{ARCH}.sample_from_anchor", config.layout == BlockLayout.ANCHOR_FIRST)
        writer.add_bool(f"{ARCH}.has_confidence_head", config.confidence.enabled)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _write_rope(writer: Any, backbone: BackboneConfig) -> None:
    rope = backbone.rope_parameters or {}
    writer.add_float32(f"{ARCH}.rope.freq_base", float(rope["rope_theta"]))
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return
    writer.add_string(f"{ARCH}.rope.scaling.type", kind)
    writer.add_float32(f"{ARCH}.rope.scaling.factor", float(rope["factor"]))
    if kind == "yarn":
        original = rope.get("original_max_position_embeddings") or backbone.max_position_embeddings or 0
        writer.add_uint32(f"{ARCH}.rope.scaling.original_context_length", int(original))
        for theirs, ours in (
            ("yarn_attn_factor", "attention_factor"),
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
        ):
            if rope.get(ours) is not None:
                writer.add_float32(f"{ARCH}.rope.scaling.{theirs}", float(rope[ours]))


def _copy_tokenizer(gguf: Any, writer: Any, target: Path, vocab_size: int) -> None:
    """Every ``tokenizer.*`` key of the target's file but its mask token, which is the draft's own."""
    if not target.is_file():
        raise CheckpointError(f"{target} does not exist: give the target's GGUF file")
    try:
        reader = gguf.GGUFReader(target)
    except (ValueError, IndexError, KeyError) as error:
        raise CheckpointError(f"{target} is not a GGUF file: {error}") from None
    fields = {name: field for name, field in reader.fields.items() if name.startswith("tokenizer.")}
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise CheckpointError(f"{target} has no tokenizer: give the target's own GGUF file")
    if len(tokens.data) != vocab_size:
        raise CheckpointError(f"{target} has {len(tokens.data)} tokens, this draft was made for {vocab_size}")
    for name, field in fields.items():
        if name == "tokenizer.ggml.mask_token_id":
            continue
        if field.types[0] == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])


def _write_tensors(gguf: Any, writer: Any, imported: Imported, file_type: str) -> None:
    """Matrices in the wanted type; vectors, tables and the confidence head in float32."""
    matrix = {"f32": "F32", "f16": "F16", "bf16": "BF16"}[file_type]
    tensors: Mapping[str, Tensor] = imported.draft.tensors
    for ours, tensor in tensors.items():
        if ours == "d2t":
            absolute = tensor + torch.arange(len(tensor))
            writer.add_tensor("d2t", absolute.to(torch.int64).numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
            continue
        data = tensor.float().numpy()
        small = tensor.ndim < 2 or ours.startswith("confidence_head.")
        kind = getattr(gguf.GGMLQuantizationType, "F32" if small else matrix)
        writer.add_tensor(_file_name(ours), gguf.quants.quantize(data, kind), raw_dtype=kind)


def _file_name(ours: str) -> str:
    """Our name of a tensor -> GGUF's."""
    if ours in _NAMES:
        return _NAMES[ours]
    _, index, part = ours.split(".", 2)
    return f"blk.{index}.{_LAYER_NAMES[part]}"
