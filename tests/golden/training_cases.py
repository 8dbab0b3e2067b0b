"""Training cases: anchors, masks, backbone, head, confidence, loss terms and all gradients of one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_spec.config import LossConfig
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.records import TargetFeatures
from modelopt_spec.training.blocks import make_blocks
from modelopt_spec.training.loss import LossWeights, Projection, draft_loss, gather_rows
from modelopt_spec.training.module import block_settings
from tests.golden.build import build_case_drafter, case_parameter_name
from tests.golden.runner import Row, compare, torch_dtype


def check_training_case(case: dict[str, Any], tensors: dict[str, Tensor], dtype: str) -> list[Row]:
    """Compare outputs, loss terms and gradients in one precision."""
    prefix = "f64." if dtype == "float64" else ""
    variants = _variants(case)
    rows: list[Row] = []
    for name, key, weights, decay in variants:
        rows += _check_variant(case, tensors, dtype, prefix, name, key, weights, decay)
    return rows


def _variants(case: dict[str, Any]) -> list[tuple[str, str, LossWeights, float | None]]:
    """(label, tensor prefix, loss weights, decay) of every loss that a case holds."""
    config = case["config"]
    decay = config["loss_decay_gamma"]
    if config["head"] == "domino":
        return [
            (f"lambda {value}", f"lambda_{value}.", LossWeights(ce=1.0 - value, base_ce=value), decay)
            for value in config["lambda_base"]
        ]
    if "ce_loss_alpha" in config:
        weights = LossWeights(
            ce=config["ce_loss_alpha"],
            tv=config["l1_loss_alpha"],
            confidence=config["confidence_head_alpha"] if config["confidence_head"] else 0.0,
        )
        return [("dspark", "", weights, decay)]
    return [
        ("dflash", "", LossWeights(ce=1.0), decay),
        ("dpace", "dpace.", LossWeights(ce=1.0, dpace_alpha=config["dpace_alpha"]), None),
    ]


def _get(tensors: dict[str, Tensor], variant: str, prefix: str, name: str) -> Tensor | None:
    for key in (f"{variant}{prefix}{name}", f"{prefix}{variant}{name}", f"{prefix}{name}"):
        if key in tensors:
            return tensors[key]
    return None


def _check_variant(
    case: dict[str, Any],
    tensors: dict[str, Tensor],
    dtype: str,
    prefix: str,
    label: str,
    variant: str,
    weights: LossWeights,
    decay: float | None,
) -> list[Row]:
    drafter = build_case_drafter(case, tensors, torch_dtype(dtype))
    loss_config = LossConfig(ce=1.0, decay=decay, position_weights="exp" if decay else "dpace")
    settings = block_settings(drafter, loss_config, case["config"]["num_anchors"])
    keep = tensors["in.block_keep_mask"].bool()
    blocks = make_blocks(
        tensors["in.input_ids"], tensors["in.loss_mask"], tensors["in.anchor_positions"], keep, settings
    )
    features = TargetFeatures(
        tensors["in.target_hidden_states"].to(torch_dtype(dtype)),
        tensors["in.target_last_hidden_states"].to(torch_dtype(dtype)),
    )
    output = drafter(features, blocks)
    slot_rows = gather_rows(output, blocks, features.last_hidden if weights.needs_target else None)
    divisor = {
        "dpace": float(case["config"]["batch_size"]),
        "dflash": float(slot_rows.weights.double().sum()),
    }.get(label)
    result = draft_loss(slot_rows, Projection.of(drafter), weights, divisor)
    result.loss.backward()
    rows = _outputs(case, tensors, dtype, prefix, drafter, features, blocks, output, keep)
    rows += _loss(tensors, dtype, prefix, variant, weights, slot_rows, result)
    rows += _gradients(tensors, dtype, prefix, variant, drafter)
    return [row._replace(name=f"{dtype} {label}: {row.name}") for row in rows]


def _outputs(
    case: dict[str, Any],
    tensors: dict[str, Tensor],
    dtype: str,
    prefix: str,
    drafter: Drafter,
    features: TargetFeatures,
    blocks: Any,
    output: Any,
    keep: Tensor,
) -> list[Row]:
    """Per-slot tensors, of kept blocks only."""
    ours = {
        "backbone_hidden": output.hidden,
        "base_logits": drafter.base_logits(output.hidden),
        "draft_logits": drafter.logits(output.hidden, output.latents),
        "confidence_logits": output.confidence,
        "target_ids": blocks.label_ids,
        "eval_mask": blocks.supervised,
        "weight_mask": blocks.supervised,
        "eval_weight_mask": blocks.supervised,
        "loss_weight_mask": blocks.weights,
    }
    rows = []
    for name, got in ours.items():
        want = tensors.get(f"{prefix}out.{name}", tensors.get(f"out.{name}"))
        if want is not None and got is not None:
            tight = dtype if f"{prefix}out.{name}" in tensors else "float32"
            rows.append(compare(f"out.{name}", got[keep], want[keep], tight))
    context = tensors.get(f"{prefix}out.context_features")
    if context is not None:
        rows.append(compare("out.context_features", drafter.context(features.taps), context, dtype))
    return rows


def _loss(
    tensors: dict[str, Tensor],
    dtype: str,
    prefix: str,
    variant: str,
    weights: LossWeights,
    slot_rows: Any,
    result: Any,
) -> list[Row]:
    rows = []
    want = _get(tensors, variant, prefix, "out.loss")
    if want is not None:
        rows.append(compare("out.loss", result.loss.detach(), want, dtype))
    terms = {"ce": "ce", "tv": "l1", "confidence": "confidence"}
    for ours, theirs in terms.items():
        want = tensors.get(f"{prefix}out.{theirs}_loss_num")
        if want is not None and ours in result.terms:
            total, weight = result.terms[ours]
            rows.append(compare(f"out.{theirs}_loss_num", torch.as_tensor(total), want, dtype))
            den = tensors.get(f"{prefix}out.{theirs}_loss_den")
            if den is not None:
                rows.append(compare(f"out.{theirs}_loss_den", torch.as_tensor(weight), den, "float32"))
    accept = tensors.get(f"{prefix}out.accept_rate")
    if accept is not None and result.acceptance is not None:
        size = accept.shape[-1]
        want = accept.reshape(-1, size)[slot_rows.blocks, slot_rows.slots]
        rows.append(compare("out.accept_rate", result.acceptance, want, dtype))
    return rows


def _gradients(tensors: dict[str, Tensor], dtype: str, prefix: str, variant: str, drafter: Drafter) -> list[Row]:
    rows = []
    for name, parameter in drafter.named_parameters():
        want = _get(tensors, variant, prefix, f"grad.{case_parameter_name(name)}")
        if want is not None:
            got = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            rows.append(compare(f"grad.{case_parameter_name(name)}", got, want, dtype))
    return rows
