"""Decode cases: one draft round, with the context given at once and in two parts over the cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from modelopt_spec.decoding.draft import BlockDrafter, DraftBlock
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import GREEDY
from modelopt_spec.drafter.drafter import Drafter
from tests.golden.build import build_case_drafter
from tests.golden.runner import Row, compare, torch_dtype


def check_decode_case(case: dict[str, Any], tensors: dict[str, Tensor], dtype: str) -> list[Row]:
    """Compare the draft round of a case with ours, in one precision, fed whole and split."""
    drafter = build_case_drafter(case, tensors, torch_dtype(dtype))
    features = tensors["in.context_features"].to(torch_dtype(dtype))
    anchor = tensors["in.anchor_token_id"].view(-1)
    rows = []
    with torch.no_grad():
        for label, parts in (("out", [features]), ("split", _split(case, features))):
            drafting = _drafting(drafter, anchor)
            for index, part in enumerate(parts):
                drafting.extend(part)
                if index < len(parts) - 1:
                    # a whole round with another anchor, whose block must leave no trace in the cache
                    drafting.draft(tensors["in.split_first_anchor_id"].view(-1), [0], [drafting.num_draft_tokens])
            ours = _round(drafting, anchor)
            rows += _compare(label, ours, tensors, dtype)
    return [row._replace(name=f"{dtype} {row.name}") for row in rows]


def _split(case: dict[str, Any], features: Tensor) -> list[Tensor]:
    at = case["config"]["ctx_split"]
    return [features[:, :at], features[:, at:]]


def _drafting(drafter: Drafter, anchor: Tensor) -> BlockDrafter:
    return BlockDrafter(drafter, len(anchor), drafter.num_draft_tokens, GREEDY, RowRandom(len(anchor), seed=0))


def _round(drafting: BlockDrafter, anchor: Tensor) -> dict[str, Tensor]:
    """Everything that a golden round holds, under its names."""
    drafter = drafting.drafter
    block = drafting.draft(anchor, [0], [drafting.num_draft_tokens])
    ids = anchor.new_full((len(anchor), drafter.config.block_size), drafter.mask_token_id)
    ids[:, 0] = anchor
    hidden, _ = drafter.decode(drafting.cache, ids)
    ours = {
        "backbone_hidden": hidden,
        "base_logits": drafter.base_logits(hidden),
        "draft_logits": _corrected(drafting, block),
        "draft_tokens": block.tokens,
    }
    if block.confidence is not None:
        chances = torch.sigmoid(block.confidence)
        ours |= {
            "confidence_logits": block.confidence,
            "confidence_probs": chances,
            "survival_probs": chances.cumprod(-1),
        }
    for layer in range(len(drafting.cache.keys)):
        keys, values = drafting.cache.read(layer)
        ours |= {f"cache_k.{layer}": keys.transpose(1, 2), f"cache_v.{layer}": values.transpose(1, 2)}
    return ours


def _corrected(drafting: BlockDrafter, block: DraftBlock) -> Tensor:
    """Logits that each draft token was taken from, by the head's step along the drafted path."""
    drafter, head = drafting.drafter, drafting.drafter.head
    logits = drafter.base_logits(block.hidden)
    if head is None:
        return logits
    state, corrected = head.initial_state(block.hidden[:, 0]), []
    for k in range(block.tokens.shape[1]):
        latent, state = head.step(block.prev_ids[:, k], block.hidden[:, k], state, drafting.first_slot + k)
        corrected.append(logits[:, k] + head.out(latent))
    return torch.stack(corrected, dim=1)


def _compare(label: str, ours: dict[str, Tensor], tensors: dict[str, Tensor], dtype: str) -> list[Row]:
    """Against the float64 tensors where a float64 run meets them, else against the float32 ones."""
    rows = []
    for name in (key.removeprefix(f"{label}.") for key in tensors if key.startswith(f"{label}.")):
        exact = tensors.get(f"f64.out.{name}") if dtype == "float64" else None
        want, precision = (tensors[f"{label}.{name}"], "float32") if exact is None else (exact, dtype)
        if name not in ours:
            rows.append(Row(f"{label}.{name} (not produced)", float("inf"), 0.0, False))
        else:
            rows.append(compare(f"{label}.{name}", ours[name], want, precision))
    return rows
