"""Fill what a drafter config leaves open from the target, and show the result once."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from modelopt_spec.config import BackboneConfig, DrafterConfig
from modelopt_spec.consoles import stderr_console
from modelopt_spec.conventions import check_target_layer_ids, default_target_layer_ids
from modelopt_spec.errors import ConfigError
from modelopt_spec.mask_token import resolve_mask_token
from modelopt_spec.resolve_parts import deepseek_taps, fill_parts
from modelopt_spec.targets.base import TargetShape

__all__ = ["resolve", "show"]


def resolve(config: DrafterConfig, shape: TargetShape, tokenizer: Any = None) -> DrafterConfig:
    """A config with no open field but, without a tokenizer, the mask token.

    Raises:
        ConfigError: a setting contradicts the target (tap outside of its layers, hidden size, vocabulary).
    """
    for name, given, known in (
        ("vocab_size", config.vocab_size, shape.vocab_size),
        ("target_hidden_size", config.target_hidden_size, shape.hidden_size),
        ("num_target_layers", config.num_target_layers, shape.num_layers),
    ):
        if given is not None and given != known:
            raise ConfigError(
                f"{name} is {given}, but this target's is {known}: leave it unset, or use the right target"
            )
    if config.target_layer_ids is None and config.num_taps is None and config.backbone.type == "moe_mhc":
        layer_ids = deepseek_taps(config.backbone, shape)
    elif config.target_layer_ids is None:
        layer_ids = default_target_layer_ids(shape.num_layers, config.num_taps)
    else:
        layer_ids = check_target_layer_ids(config.target_layer_ids, shape.num_layers)
    mask_token, mask_token_id = resolve_mask_token(config.mask_token, config.mask_token_id, shape, tokenizer)
    if config.draft_vocab_size is not None and config.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"draft_vocab_size is {config.draft_vocab_size}, more than the target's {shape.vocab_size}: leave it unset"
        )
    return config.replace(
        target_layer_ids=layer_ids,
        num_taps=len(layer_ids),
        mask_token=mask_token,
        mask_token_id=mask_token_id,
        backbone=_resolve_backbone(config.backbone, shape),
        vocab_size=shape.vocab_size,
        target_hidden_size=shape.hidden_size,
        num_target_layers=shape.num_layers,
    )


def _resolve_backbone(backbone: BackboneConfig, shape: TargetShape) -> BackboneConfig:
    if backbone.hidden_size not in (None, shape.hidden_size):
        raise ConfigError(
            f"backbone.hidden_size is {backbone.hidden_size}, but the draft shares the target's embedding and output "
            f"projection of width {shape.hidden_size}: leave it unset"
        )
    backbone = fill_parts(backbone, shape)
    own_heads = backbone.num_attention_heads is not None
    derived = {
        "num_layers": min(5, max(1, shape.num_layers // 2)),
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": backbone.num_attention_heads if own_heads else shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": dict(shape.rope_parameters),
        "max_position_embeddings": shape.max_position_embeddings or 32768,
    }
    rope = backbone.rope_parameters
    if rope is not None and "rope_theta" not in rope:
        raise ConfigError(f"backbone.rope_parameters {rope} lacks rope_theta: add it, or leave rope_parameters unset")
    return backbone.replace(**{name: value for name, value in derived.items() if getattr(backbone, name) is None})


def show(given: DrafterConfig, resolved: DrafterConfig, *, console: Console | None = None) -> None:
    """Print every setting of a drafter and where it came from."""
    table = Table(title=f"drafter: {resolved.algorithm}", title_justify="left", show_edge=False)
    table.add_column("setting")
    table.add_column("value")
    table.add_column("from", style="dim")
    for name, value, was in _rows(given, resolved):
        if value is None and name == "mask_token_id":
            table.add_row(name, "[yellow]not set[/]", "needed to train: pass a tokenizer, mask_token or mask_token_id")
        elif value is not None:
            table.add_row(name, _format(value), "config" if was == value else "target")
    (console or stderr_console()).print(table)


def _rows(given: Any, resolved: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    rows: list[tuple[str, Any, Any]] = []
    for name in type(resolved).model_fields:
        value, was = getattr(resolved, name), getattr(given, name, None)
        if hasattr(value, "model_fields_set"):
            rows += _rows(was, value, f"{prefix}{name}.")
        elif name not in ("algorithm", "num_taps"):
            rows.append((prefix + name, value, was))
    return rows


def _format(value: Any) -> str:
    if isinstance(value, tuple | list):
        return " ".join(str(v) for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return str(value)
