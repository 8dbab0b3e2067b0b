"""The loss on the references' own hidden states: terms, acceptance and the gradients that the loss and head decide."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from modelopt_spec.training.loss import LossWeights, Projection, SlotRows, draft_loss

DATA = Path(__file__).parent.parent / "golden" / "data"
DTYPES = {"float32": ("", torch.float32, 1e-5), "float64": ("f64.", torch.float64, 1e-10)}


class Case:
    """One golden file in one precision."""

    def __init__(self, name: str, dtype: str) -> None:
        self.config = json.loads((DATA / f"{name}.json").read_text())["config"]
        self.tensors = load_file(DATA / f"{name}.safetensors")
        self.prefix, self.dtype, self.tolerance = DTYPES[dtype]

    def weight(self, name: str) -> Tensor:
        return self.tensors[name].to(self.dtype).requires_grad_()

    def want(self, name: str, group: str = "") -> Tensor:
        return self.tensors[f"{group}{self.prefix}{name}"]

    def input(self, name: str) -> Tensor:
        return self.tensors[f"in.{name}"]

    def rows(
        self,
        weights: Tensor,
        *,
        latents: Tensor | None = None,
        confidence: Tensor | None = None,
        label_offset: int = 1,
        target: bool = False,
    ) -> SlotRows:
        """Rows of the slots of positive weight [B, N, K]."""
        hidden = self.want("out.backbone_hidden").to(self.dtype)
        keep = (weights > 0).flatten()
        size = weights.shape[-1]
        index = keep.nonzero().squeeze(1)
        places = distinct = None
        if target:
            last = self.input("target_last_hidden_states").to(self.dtype)
            length = last.shape[1]
            positions = self.input("anchor_positions").unsqueeze(-1) + torch.arange(size) + label_offset - 1
            flat = positions.clamp(max=length - 1) + torch.arange(len(last)).view(-1, 1, 1) * length
            places, target_index = torch.unique(flat.flatten()[keep], return_inverse=True)
            distinct = last.flatten(0, 1)[places]
        return SlotRows(
            hidden=hidden.flatten(0, 2)[keep].requires_grad_(),
            latents=None if latents is None else latents.flatten(0, 2)[keep],
            confidence=None if confidence is None else confidence.flatten()[keep],
            labels=self.tensors["out.target_ids"].flatten()[keep],
            weights=weights.flatten()[keep],
            slots=index % size,
            blocks=index // size,
            target_hidden=distinct,
            target_index=target_index if target else None,
        )

    def check(self, name: str, got: Tensor, want: Tensor) -> None:
        scale = max(1.0, float(want.abs().max()))
        difference = float((got.detach().double() - want.double()).abs().max())
        assert difference <= self.tolerance * scale, f"{name} is off by {difference}"

    @property
    def lm_head(self) -> Tensor:
        return self.tensors["lm_head.weight"].to(self.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dspark_gated(dtype: str) -> None:
    case = Case("deepspec_dspark_gated", dtype)
    names = ["markov_head.markov_w1.weight", "markov_head.gate_proj.weight", "markov_head.gate_proj.bias"]
    names += ["confidence_head.proj.weight", "confidence_head.proj.bias"]
    p = {name: case.weight(name) for name in names}
    out = case.weight("markov_head.markov_w2.weight")
    hidden, ids = case.want("out.backbone_hidden").to(case.dtype), case.input("input_ids")
    anchors = case.input("anchor_positions")
    previous = torch.cat([ids.gather(1, anchors).unsqueeze(-1), case.tensors["out.target_ids"][..., :-1]], -1)
    embedded = functional.embedding(previous, p[names[0]])
    gate = functional.linear(torch.cat([hidden, embedded], -1), p[names[1]], p[names[2]]).sigmoid()
    confidence = functional.linear(torch.cat([hidden, embedded], -1), p[names[3]], p[names[4]]).squeeze(-1)
    rows = case.rows(case.want("out.loss_weight_mask"), latents=gate * embedded, confidence=confidence, target=True)
    weights = LossWeights(ce=0.1, tv=0.9, confidence=1.0)
    result = draft_loss(rows, Projection(case.lm_head, None, out), weights)
    case.check("loss", result.loss, case.want("out.loss"))
    for ours, theirs in {"ce": "ce", "tv": "l1", "confidence": "confidence"}.items():
        case.check(ours, result.terms[ours].total, case.want(f"out.{theirs}_loss_num"))
        case.check(ours, result.terms[ours].weight, case.want(f"out.{theirs}_loss_den"))
    taught = case.tensors["out.eval_mask"]
    case.check("acceptance", result.acceptance, case.want("out.accept_rate")[taught])
    found = torch.autograd.grad(result.loss, [*p.values(), out])
    for name, value in zip([*names, "markov_head.markov_w2.weight"], found, strict=True):
        case.check(name, value, case.want(f"grad.{name}"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lambda_base", [1.0, 0.4, 0.0])
def test_domino(dtype: str, lambda_base: float) -> None:
    case = Case("specforge_domino", dtype)
    mix, out = case.weight("embed_proj.0.weight"), case.weight("embed_proj.2.weight")
    hidden, states = (case.want(f"out.{name}").to(case.dtype) for name in ("backbone_hidden", "gru_states"))
    latents = functional.silu(functional.linear(torch.cat([hidden, states], -1), mix))
    corrected = torch.arange(hidden.shape[2]) >= case.config["pure_draft_prefix_len"]
    rows = case.rows(case.want("out.loss_weight_mask"), latents=latents * corrected.unsqueeze(-1))
    weights = LossWeights(ce=1 - lambda_base, base_ce=lambda_base)
    result = draft_loss(rows, Projection(case.lm_head, None, out), weights)
    case.check("loss", result.loss, case.want("out.loss", f"lambda_{lambda_base}."))
    case.check("final", result.terms["ce"].total, case.want("out.final_loss_num"))
    if lambda_base:
        case.check("base", result.terms["base_ce"].total, case.want("out.base_loss_num"))
    for name, value in zip(("0", "2"), torch.autograd.grad(result.loss, [mix, out]), strict=True):
        case.check(name, value, case.want(f"grad.embed_proj.{name}.weight", f"lambda_{lambda_base}."))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bonus_anchor_cross_entropy_and_dpace(dtype: str) -> None:
    case = Case("zlab_dflash_bonus_anchor", dtype)
    mask = case.tensors["out.weight_mask"].to(case.dtype)
    slots = torch.arange(mask.shape[-1], dtype=torch.float64)
    decay = torch.exp(-(slots - 1).clamp(min=0) / case.config["loss_decay_gamma"]).to(case.dtype)
    rows = case.rows(mask * decay)
    projection = Projection(case.lm_head)
    # This reference divides by the weights without 1e-6.
    result = draft_loss(rows, projection, LossWeights(ce=1.0), rows.weights.sum())
    case.check("loss", result.loss, case.want("out.loss"))
    case.check("sum", result.terms["ce"].total, case.want("out.loss_num"))

    rows = case.rows(mask)
    weights = LossWeights(ce=1.0, dpace_alpha=case.config["dpace_alpha"])
    # The reference divides D-PACE's sum by the batch size; by default we divide by the summed weights.
    result = draft_loss(rows, projection, weights, case.config["batch_size"])
    case.check("dpace loss", result.loss, case.want("out.loss", "dpace."))
    case.check("dpace sum", result.terms["ce"].total, case.want("out.loss_num", "dpace."))
    own = draft_loss(rows, projection, weights)
    case.check("own", own.loss * (own.weights.sum() + 1e-6), case.want("out.loss_num", "dpace."))
