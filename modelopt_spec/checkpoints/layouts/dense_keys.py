"""Keys and names that the dense layouts share besides the Qwen3 shape: taps, mask, block size, vocabulary, sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.config import BackboneConfig

__all__ = ["read_draft_keys", "sink_to_file", "sink_to_ours"]

_OUR_SINK, _FILE_SINK = ".self_attn.sinks", ".self_attn.attention_sink_bias"


def sink_to_file(ours: str) -> str:
    """Our name of an attention sink -> the name that vLLM and SGLang read."""
    return ours.replace(_OUR_SINK, _FILE_SINK) if ours.endswith(_OUR_SINK) else ours


def sink_to_ours(name: str) -> str:
    """Inverse of :func:`sink_to_file`."""
    return name.replace(_FILE_SINK, _OUR_SINK) if name.endswith(_FILE_SINK) else name


def layer_ids(value: Any) -> tuple[int, ...]:
    """A list of whole numbers as a tuple."""
    if not isinstance(value, list | tuple) or any(type(i) is not int for i in value):
        raise TypeError(f"{value!r} is not a list of whole numbers")
    return tuple(value)


def read_draft_keys(
    keys: KeyReader,
    entries: Mapping[str, TensorEntry],
    backbone: BackboneConfig,
    nested: str = "dflash_config.",
) -> dict[str, Any]:
    """Fields of a DrafterConfig that stand at the top level or in ``nested``, whichever is there.

    Where no key says it, the width of the target comes from the shape of ``fc.weight``.
    """

    def both(ours: str, key: str, **kwargs: Any) -> Any:
        return keys.get(ours, key, nested + key, **kwargs)

    ids = both("target_layer_ids", "target_layer_ids", convert=layer_ids)
    vocab = keys.get("vocab_size", "vocab_size", convert=int)
    fc = entries.get("fc.weight")
    width = fc.shape[-1] // max(1, len(ids)) if fc is not None and len(fc.shape) == 2 else backbone.hidden_size
    draft_vocab = keys.get("draft_vocab_size", "draft_vocab_size", default=None)
    return {
        "block_size": both("block_size", "block_size", convert=int),
        "target_layer_ids": ids,
        "num_taps": len(ids),
        "mask_token_id": both("mask_token_id", "mask_token_id", convert=int),
        "vocab_size": vocab,
        "draft_vocab_size": None if draft_vocab in (None, vocab) else int(draft_vocab),
        "target_hidden_size": keys.get("target_hidden_size", "target_hidden_size", default=width, convert=int),
        "num_target_layers": both("num_target_layers", "num_target_layers", default=None),
    }
