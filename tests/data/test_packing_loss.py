"""Packing changes the shape of a batch and nothing else: losses and gradients are those of the rows apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import modelopt_spec as mtsp
from modelopt_spec.config import LossConfig
from modelopt_spec.data.collate import collate_rows
from modelopt_spec.data.packing import pack_samples
from modelopt_spec.data.store import Sample
from modelopt_spec.training.module import DraftTrainingModule
from tests.data.test_feature_cache import make_rows
from tests.tiny import tiny


def as_row(sample: Sample) -> dict:
    return {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask, "segment_ids": sample.segment_ids}


def losses(model, rows: list[dict], loss: LossConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss (divisor 1) of every anchor of every row, and the drafter's gradients."""
    module = DraftTrainingModule(model, loss, num_anchors=10_000)
    batch = collate_rows(rows, pad_token_id=0)
    batch |= {"lengths": [len(row["input_ids"]) for row in rows], "rows": list(range(len(rows)))}
    blocks = module.blocks(batch, torch.Generator().manual_seed(0))
    model.drafter.zero_grad()
    value = module(batch, blocks, divisor=1.0)[0]
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["dspark", "dflash", "domino"])
def test_packed_rows_teach_what_the_rows_apart_teach(mode: str) -> None:
    model = tiny(dtype=torch.float64)
    config = {"target_layer_ids": (1, 3), "block_size": 4, "mask_token_id": 96}
    if mode == "dspark":
        config |= {"head": {"type": "rnn", "rank": 8}, "confidence": {"enabled": True}}
    mtsp.convert(model, (mode, config), quiet=True)
    model.drafter.double()
    loss = LossConfig(ce=0.4, tv=0.6, confidence=1.0 if mode == "dspark" else 0.0, decay=3.0)
    rows = make_rows(7, seed=4)
    rows[2]["loss_mask"][:] = True
    samples = [Sample(row["input_ids"], np.asarray(row["loss_mask"])) for row in rows]
    packed = [as_row(sample) for sample in pack_samples(samples, max_length=90)]
    assert len(packed) < len(rows)
    value, gradients = losses(model, packed, loss)
    apart, expected = losses(model, rows, loss)
    torch.testing.assert_close(value, apart, rtol=1e-10, atol=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-8, atol=1e-10)
    assert value > 0
