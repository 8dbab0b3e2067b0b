"""What a training step costs: matrix-product FLOPs and bytes, from shapes alone.

A multiplication with an addition counts as 2 FLOPs; norms, activations, softmax and rotary angles are left out. A
backward pass costs twice its forward pass where both factors need gradients, and once where one is frozen (the fc over
the target's taps, the target's output projection).

Legend: B rows, S tokens of a padded row, N blocks a row, K slots, D hidden, T taps, R head rank, V vocabulary,
M supervised slots, P distinct target positions, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from modelopt_spec.config import DrafterConfig, LossConfig
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.records import BlockBatch
from modelopt_spec.targets.hf import find_decoder, text_config
from modelopt_spec.training.sizes import sizes

__all__ = [
    "StepShape",
    "TargetCost",
    "activation_bytes",
    "drafter_flops",
    "drafter_parts",
    "memory",
    "optimizer_bytes",
    "target_flops",
]

MEGA = 2**20
OPTIMIZER_BYTES = {"adamw": 8, "adam": 8, "lion": 4, "sgd": 0, "adafactor": 0.1, "8bit": 2, "4bit": 1}
"""State of an optimizer for each parameter, in bytes; the longest matching part of its name decides."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of one optimizer step's work, summed over its micro-batches (and over batches, divided: means)."""

    rows: float
    """B."""
    tokens: float
    """Tokens that are no padding."""
    positions: float
    """B * S, padding included: what the target runs on."""
    position_pairs: float
    """B * S^2."""
    slots: float
    """B * N * K, padding blocks included: what the draft pass runs on."""
    seen: float
    """Keys that the slots attend to, summed over slots."""
    supervised: float
    """M."""
    target_positions: float
    """P."""

    @classmethod
    def of(cls, batch: dict[str, Any], blocks: BlockBatch) -> StepShape:
        """Sizes of one batch with its blocks."""
        rows, length = batch["input_ids"].shape
        size = blocks.input_ids.shape[-1]
        taught = blocks.supervised & (blocks.weights > 0)
        offsets = (blocks.target_positions + length * _column(rows)).masked_select(taught)
        context = (blocks.anchors - blocks.context_start + size) * blocks.keep
        return cls(
            rows=rows,
            tokens=float(sum(batch["lengths"])),
            positions=float(rows * length),
            position_pairs=float(rows * length**2),
            slots=float(blocks.input_ids.numel()),
            seen=float(context.sum() * size),
            supervised=float(taught.sum()),
            target_positions=float(len(offsets.unique())),
        )

    @staticmethod
    def mean(shapes: Iterable[StepShape], micro_batches: float = 1.0) -> StepShape:
        """The mean of several micro-batches, times ``micro_batches``."""
        rows = [asdict(shape) for shape in shapes]
        return StepShape(**{name: micro_batches * sum(row[name] for row in rows) / len(rows) for name in rows[0]})


def _column(rows: int) -> Tensor:
    import torch

    return torch.arange(rows).view(-1, 1, 1)


# ---- target ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetCost:
    """Sizes of a target that decide what running it costs."""

    parameters: int
    layer_parameters: int
    """Of the decoder layers."""
    active: int
    """Matrix entries of the layers that one token is multiplied with: of experts, the chosen share."""
    attention_width: int
    """Query heads times their width, summed over layers."""
    itemsize: int

    @classmethod
    def of(cls, model: nn.Module) -> TargetCost:
        """Read from a model, which may be on the meta device."""
        config, decoder = text_config(model), find_decoder(model)
        layers: Any = decoder.layers
        chosen = getattr(config, "num_experts_per_tok", None) or 1
        active = 0.0
        for name, parameter in layers.named_parameters():
            if parameter.ndim < 2:
                continue
            routed = ".experts." in name
            experts = _experts(config) if routed else 1
            active += parameter.numel() * (chosen / experts if routed else 1.0)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            layer_parameters=sum(p.numel() for p in layers.parameters()),
            active=int(active),
            attention_width=width * len(layers),
            itemsize=next(layers.parameters()).dtype.itemsize,
        )


def _experts(config: Any) -> int:
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        value = getattr(config, name, None)
        if value:
            return int(value)
    return 1


def target_flops(target: TargetCost, shape: StepShape, *, attended: float = 0.5) -> float:
    """Forward pass of the layers, without logits.

    ``attended`` is the share of the S x S scores that the attention kernel computes: half with causal flash kernels.
    """
    return 2.0 * target.active * shape.positions + 4.0 * target.attention_width * shape.position_pairs * attended


# ---- drafter ---------------------------------------------------------------------------------------------------------


def drafter_parts(drafter: Drafter) -> dict[str, int]:
    """Parameters by part: ``context`` (fc), ``layers``, ``head``, ``confidence`` and ``other`` (norms, projections)."""
    parts = {"context": 0, "layers": 0, "head": 0, "confidence": 0, "other": 0}
    head = drafter.head.prefix if drafter.head is not None else None
    for name, parameter in drafter.named_parameters():
        first = name.split(".")[0]
        part = {"fc": "context", "main_proj": "context", "layers": "layers", "confidence_head": "confidence"}.get(first)
        part = "head" if head is not None and first == head else part
        parts[part or "other"] += parameter.numel()
    return parts


def _layer_matrices(drafter: Drafter, config: DrafterConfig) -> tuple[float, float]:
    """Matrix entries of all layers: those that a slot is multiplied with, and the keys' and values' among them."""
    slot = context = 0.0
    moe = config.backbone.moe
    layers: Any = getattr(drafter, "layers", nn.ModuleList())
    for name, parameter in layers.named_parameters():
        if parameter.ndim < 2:
            continue
        share = 1.0
        if moe is not None and ".experts." in name:
            share = (moe.experts_per_token or 1) / (moe.num_experts or 1)
        slot += parameter.numel() * share
        if any(part in name for part in ("k_proj", "v_proj", "kv_proj")):
            context += parameter.numel()
    return slot, context


def drafter_flops(drafter: Drafter, loss: LossConfig, shape: StepShape) -> dict[str, float]:
    """Forward and backward of one step, by part.

    Returns:
        ``context`` (fc, keys and values of the context), ``blocks`` (the slots' projections and MLPs), ``attention``,
        ``head`` (latents and W_out), ``confidence`` and ``loss`` (output projection of drafts and target positions).
    """
    config = drafter.config
    width, vocab = config.backbone.hidden_size or 0, config.vocab_size or 0
    fc = drafter_parts(drafter)["context"]
    slot, context = _layer_matrices(drafter, config)
    backbone = config.backbone
    attention_width = (backbone.num_attention_heads or 0) * (backbone.head_dim or 0) * (backbone.num_layers or 0)
    flops = {
        "context": 2.0 * shape.positions * (2 * fc + 3 * context),
        "blocks": 3 * 2.0 * shape.slots * slot,
        "attention": 3 * 4.0 * attention_width * shape.seen,
        "head": 0.0,
        "confidence": 3 * 2.0 * shape.slots * drafter_parts(drafter)["confidence"],
        "loss": 2 * 2.0 * shape.supervised * width * vocab,
    }
    if loss.needs_target:
        flops["loss"] += 2.0 * shape.target_positions * width * vocab
    if drafter.head is not None:
        out = drafter.head.out.weight.numel()
        tables = sum(p.numel() for m in drafter.head.modules() if isinstance(m, nn.Embedding) for p in m.parameters())
        inner = sum(p.numel() for p in drafter.head.parameters() if p.ndim > 1) - out - tables
        flops["head"] = 3 * 2.0 * (shape.slots * inner + shape.supervised * out)
    return flops


# ---- memory ----------------------------------------------------------------------------------------------------------


def optimizer_bytes(name: str) -> float:
    """State for each parameter, in bytes."""
    known = [key for key in OPTIMIZER_BYTES if key in name]
    return OPTIMIZER_BYTES[max(known, key=lambda key: (key in ("8bit", "4bit"), len(key)))] if known else 8


def activation_bytes(config: DrafterConfig, shape: StepShape, *, autocast: bool, checkpointing: bool = False) -> float:
    """What the pass of a plain dense drafter keeps for its backward pass, for one micro-batch, in bytes.

    For each slot in each layer: both residual streams and their normed forms, the inputs of the projections, queries,
    keys and values before and after norm and rotation, and four times the MLP's width. For each context position in
    each layer: keys and values likewise. Once: the taps, the context features with their norm, and the final norm.
    Attention keeps no scores. Under autocast inputs of projections are copied to 2 bytes (once for each projection),
    and products take 2 bytes; residual streams, norms and rotations stay in float32. With checkpointing a layer keeps
    its input, and one layer at a time the rest. (On a CPU in full precision norm.py keeps about a sixth less.)
    """
    backbone = config.backbone
    width, taps = backbone.hidden_size or 0, len(config.target_layer_ids or ())
    dim, inner, layers = backbone.head_dim or 0, backbone.intermediate_size or 0, backbone.num_layers or 0
    queries, keys = (backbone.num_attention_heads or 0) * dim, (backbone.num_key_value_heads or 0) * dim
    if autocast:
        copied = 5 * width + 2 * queries + 2 * keys + 4 * inner
        slot = 4 * (4 * width + 2 * queries + 2 * keys) + 2 * copied
        position = 4 * 2 * keys + 2 * (width + 2 * keys)
        once = shape.slots * 6 * width + shape.positions * (8 * width + 2 * taps * width)
    else:
        slot = 4 * (6 * width + 4 * queries + 4 * keys + 4 * inner)
        position = 4 * 4 * keys
        once = 4 * (shape.slots * 3 * width + shape.positions * (3 + taps) * width)
    layer = slot * shape.slots + position * shape.positions
    if checkpointing:
        return once + layer + (layers - 1) * 4 * width * shape.slots
    return once + layers * layer


def _activations(drafter: Drafter, shape: StepShape, *, autocast: bool, checkpointing: bool) -> float:
    """Of any drafter; experts and hyper-connections have an estimate of their own (sizes.py)."""
    backbone = drafter.config.backbone
    if backbone.type == "dense" and backbone.residual == "plain" and backbone.mlp == "dense":
        return activation_bytes(drafter.config, shape, autocast=autocast, checkpointing=checkpointing)
    found = sizes(
        drafter,
        rows=max(1, round(shape.rows)),
        length=round(shape.positions / shape.rows),
        num_anchors=max(1, round(shape.slots / shape.rows / drafter.config.block_size)),
        compute_bytes=2 if autocast else 4,
    )
    return float(found.checkpointed_bytes if checkpointing else found.activation_bytes)


def memory(
    drafter: Drafter,
    target: TargetCost,
    loss: LossConfig,
    shape: StepShape,
    *,
    optimizer: str,
    autocast: bool,
    ranks: int = 1,
    shard_drafter: bool = False,
    shard_target: bool = False,
    checkpointing: bool = False,
    loss_rows: int = 0,
    loss_cells: int = 0,
) -> dict[str, float]:
    """Bytes on one rank while it trains, by purpose.

    Args:
        drafter: may be on the meta device.
        target: its sizes.
        loss: decides whether target distributions are held.
        shape: of one micro-batch.
        optimizer: name, as in TrainingArguments.
        autocast: bf16 or fp16 arithmetic over float32 weights.
        ranks: over which shards are spread.
        shard_drafter: FSDP2.
        shard_target: ``training.shard_target``.
        checkpointing: gradient checkpointing of the drafter's layers.
        loss_rows: rows of length V of a loss chunk.
        loss_cells: float32 cells of its elementwise passes.
    """
    config = drafter.config
    total = sum(p.numel() for p in drafter.parameters())
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    spread = ranks if shard_drafter else 1
    layer_bytes = target.layer_parameters * target.itemsize / (ranks if shard_target else 1)
    width, taps = config.backbone.hidden_size or 0, len(config.target_layer_ids or ())
    features = shape.positions * (taps + 1) * (config.target_hidden_size or width) * target.itemsize
    backbone = config.backbone
    transient = shape.positions * (3 * (backbone.intermediate_size or 0) + 4 * width) * target.itemsize
    item = 2 if autocast else 4
    chunk = loss_rows * (config.vocab_size or 0) * item * (2 if loss.needs_target else 1) + 4 * 4 * loss_cells
    buckets = 4 * trained if ranks > 1 and not shard_drafter else 0
    return {
        "target": layer_bytes + (target.parameters - target.layer_parameters) * target.itemsize,
        "weights": (4 * total / spread) + (2 * total if autocast else 0),
        "gradients": 4 * trained / spread + buckets,
        "optimizer": optimizer_bytes(optimizer) * trained / spread,
        "features": features,
        "target_activations": transient,
        "activations": _activations(drafter, shape, autocast=autocast, checkpointing=checkpointing),
        "loss": float(chunk),
    }
