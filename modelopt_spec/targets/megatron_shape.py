"""What a drafter derives from a Megatron-Core model.

Megatron keeps no unpadded vocabulary, special tokens or rope scaling. A model that carries ``model.hf_config`` (set by
:func:`~modelopt_spec.targets.megatron_model.build_gpt_model`; set it yourself on a model made elsewhere) gives the same
defaults as the Hugging Face model does. Without it they follow Megatron's own config.
"""

from __future__ import annotations

from typing import Any

from modelopt_spec.errors import UnsupportedError
from modelopt_spec.targets.base import TargetShape
from modelopt_spec.targets.hf import rope_parameters
from modelopt_spec.targets.megatron_model import GPTModel

__all__ = ["known_vocab_size", "read_shape"]


def _text_config(model: GPTModel) -> Any:
    config = getattr(model, "hf_config", None)
    return config.get_text_config(decoder=True) if config is not None else None


def known_vocab_size(model: GPTModel) -> int:
    """Tokens of the vocabulary: the Hugging Face config's, else all of Megatron's rows (padding included)."""
    config = _text_config(model)
    return int(config.vocab_size) if config is not None else int(model.vocab_size)


def _own_rope(model: GPTModel) -> dict[str, Any]:
    if model.rotary_scaling or model.position_embedding_type == "yarn":
        raise UnsupportedError(
            "this Megatron model scales its rotary embedding, which its attributes do not describe: set "
            "model.hf_config to the target's transformers config before convert"
        )
    return {"rope_type": "default", "rope_theta": float(model.rotary_base)}


def read_shape(model: GPTModel, vocab_size: int) -> TargetShape:
    """Collect a :class:`TargetShape`; ``vocab_size`` is the number of tokens without Megatron's padding."""
    config, hf = model.config, _text_config(model)
    special: set[int] = set()
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(hf, key, None)
        special.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return TargetShape(
        model_type=hf.model_type if hf is not None else "megatron_gpt",
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        intermediate_size=config.ffn_hidden_size,
        rms_norm_eps=config.layernorm_epsilon,
        rope_parameters=rope_parameters(hf, config.kv_channels) if hf is not None else _own_rope(model),
        max_position_embeddings=(
            getattr(hf, "max_position_embeddings", 0) if hf is not None else model.max_position_embeddings
        ),
        embedding_rows=vocab_size,
        tied_embeddings=bool(model.share_embeddings_and_output_weights),
        special_token_ids=tuple(sorted(special)),
    )
