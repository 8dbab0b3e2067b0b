"""How large a drafter is and what training it takes, computed from shapes alone and shown before a run.

Weights, gradients and Adam's two moments are exact. Activations are an estimate of what the layers keep for the
backward pass; the loss keeps chunks of bounded size beside them, and the target's own pass keeps nothing.

Legend: B rows, S context positions, N blocks, K slots, n streams, D hidden, H heads, d head width, E experts, k chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from modelopt_spec.config import BackboneConfig, DrafterConfig
from modelopt_spec.consoles import stderr_console
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.drafter.moe import MoE

__all__ = ["Sizes", "active_parameters", "show_sizes", "sizes"]

_ADAM_MOMENTS = 2
_SINKHORN_NUMBERS = 4
"""Intermediate matrices that one Sinkhorn iteration keeps."""


@dataclass(frozen=True)
class Sizes:
    """Bytes are of one rank, before any sharding."""

    parameters: int
    trainable: int
    active: int
    """Parameters that one slot meets: of E experts k, of an embedding table one row."""
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    checkpointed_bytes: int
    """Activations with gradient checkpointing: each layer's input, and one layer as a whole."""

    @property
    def total_bytes(self) -> int:
        """Weights, gradients, optimizer and activations (without gradient checkpointing)."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def show(self, console: Console | None = None) -> None:
        """Print one line for each."""
        table = Table("", "", title="drafter size", title_justify="left", show_edge=False, show_header=False)
        table.add_row("parameters", f"{self.parameters:,} ({self.trainable:,} trained)")
        table.add_row("active for a slot", f"{self.active:,}")
        table.add_row("weights and gradients", _gigabytes(self.weight_bytes + self.gradient_bytes))
        table.add_row("optimizer", f"{_gigabytes(self.optimizer_bytes)} (Adam, float32)")
        table.add_row(
            "activations, about",
            f"{_gigabytes(self.activation_bytes)} ({_gigabytes(self.checkpointed_bytes)} with gradient_checkpointing)",
        )
        (console or stderr_console()).print(table)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"


def active_parameters(drafter: nn.Module) -> int:
    """Parameters that take part in one slot's pass."""
    total = sum(parameter.numel() for parameter in drafter.parameters())
    for module in drafter.modules():
        if isinstance(module, MoE):
            experts, chosen = module.config.num_experts or 1, module.config.experts_per_token or 1
            routed = sum(parameter.numel() for parameter in module.experts.parameters())
            total -= routed * (experts - chosen) // experts
        elif isinstance(module, nn.Embedding):
            total -= module.weight.numel() - module.embedding_dim
    return total


def sizes(drafter: Drafter, *, rows: int, length: int, num_anchors: int, compute_bytes: int = 4) -> Sizes:
    """Sizes of training a drafter with AdamW in float32.

    Args:
        drafter: built, on any device (also ``meta``).
        rows: B, rows of one forward pass on one rank.
        length: S, tokens of a row.
        num_anchors: N, blocks of a row.
        compute_bytes: width of an activation, 2 under bf16 autocast.
    """
    parameters = list(drafter.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in parameters)
    slots, context = rows * num_anchors * drafter.config.block_size, rows * length
    layer = _layer_bytes(drafter.config.backbone, slots, context, compute_bytes)
    entry = _entry_bytes(drafter.config, slots, context, compute_bytes)
    layers = drafter.config.backbone.num_layers or 0
    streams = _streams(drafter.config.backbone)
    inputs = 4 * slots * streams * (drafter.config.backbone.hidden_size or 0)
    return Sizes(
        parameters=sum(p.numel() for p in parameters),
        trainable=trainable,
        active=active_parameters(drafter),
        weight_bytes=weights,
        gradient_bytes=4 * trainable,
        optimizer_bytes=4 * _ADAM_MOMENTS * trainable,
        activation_bytes=entry + layers * layer,
        checkpointed_bytes=entry + layers * inputs + layer,
    )


def show_sizes(drafter: Drafter, arguments: Any, *, length: int, num_anchors: int) -> None:
    """Print the sizes of a drafter with experts or several streams before it trains; a dense one says little new.

    Args:
        drafter: about to be trained. arguments: the run's TrainingArguments.
        length: longest row, in tokens. num_anchors: blocks of a row.
    """
    backbone = drafter.config.backbone
    if backbone.mlp == "dense" and backbone.residual == "plain":
        return
    sizes(
        drafter,
        rows=arguments.per_device_train_batch_size,
        length=length,
        num_anchors=num_anchors,
        compute_bytes=2 if arguments.bf16 or arguments.fp16 else 4,
    ).show()


def _streams(backbone: BackboneConfig) -> int:
    return (backbone.hyper_connection.streams or 1) if backbone.hyper_connection is not None else 1


def _entry_bytes(config: DrafterConfig, slots: int, context: int, width: int) -> int:
    """Features, fused context, collapse and final norm."""
    hidden, streams = config.backbone.hidden_size or 0, _streams(config.backbone)
    taps = len(config.target_layer_ids or ()) * (config.target_hidden_size or 0)
    return context * (taps * width + 3 * hidden * width) + slots * hidden * 4 * (streams + 3)


def _layer_bytes(backbone: BackboneConfig, slots: int, context: int, width: int) -> int:
    """What one layer keeps: norms' inputs and outputs, attention's operands, the MLP's, and the streams'."""
    hidden = backbone.hidden_size or 0
    norms = 4 * hidden
    a_slot, a_position = _attention_numbers(backbone)
    numbers = norms + a_slot + _mlp_numbers(backbone)
    return slots * (numbers * width + _mixing_bytes(backbone)) + context * a_position * width


def _attention_numbers(backbone: BackboneConfig) -> tuple[int, int]:
    """(for a slot, for a context position): projections before and after norm and rotation, and the output."""
    heads, dim, hidden = backbone.num_attention_heads or 0, backbone.head_dim or 0, backbone.hidden_size or 0
    latent = backbone.latent_attention
    if latent is not None:
        rank, groups = latent.q_lora_rank or 0, (latent.o_groups or 1) * (latent.o_lora_rank or 0)
        return 2 * rank + 5 * heads * dim + 3 * dim + groups + hidden, 3 * dim
    kv_heads = backbone.num_key_value_heads or 0
    return 5 * heads * dim + 5 * kv_heads * dim + hidden, 5 * kv_heads * dim


def _mlp_numbers(backbone: BackboneConfig) -> int:
    """Input, gate, up, activation, product and output, for every expert that a slot passes."""
    hidden, moe = backbone.hidden_size or 0, backbone.moe
    if moe is None:
        return hidden + 5 * (backbone.intermediate_size or 0)
    wide, chosen = moe.intermediate_size or 0, moe.experts_per_token or 1
    routed = chosen * (3 * hidden + 6 * wide)
    return hidden + routed + moe.num_shared_experts * 6 * wide + 3 * (moe.num_experts or 0)


def _mixing_bytes(backbone: BackboneConfig) -> int:
    """Both hyper-connections of a layer, in float32: the streams, the output, and Sinkhorn's matrices."""
    hyper = backbone.hyper_connection
    if hyper is None:
        return 0
    n, hidden = hyper.streams or 1, backbone.hidden_size or 0
    matrices = _SINKHORN_NUMBERS * (hyper.sinkhorn_iterations or 1) * n * n
    return 2 * 4 * (2 * n * hidden + hidden + matrices)
