"""One training step (forward and backward, cached features, float32, one thread) of drafters with experts and
hyper-connections, against the floor of their own needed multiplications: DeepSeek-V4 stages, the same parts in
Qwen3-style layers, and the plain dense layers at as many active parameters beside them.

Repetitions are interleaved with a large matrix product, whose rate turns multiplications into seconds; times are CPU
seconds, figures are medians. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.step_sizes import StepSizes, needed_flops, sgemm_rate
from benchmarks.train_step import CachedTarget, make_inputs, spent_by
from modelopt_spec.config import DSparkConfig, LossConfig
from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.records import BlockBatch, TargetFeatures
from modelopt_spec.training.blocks import make_blocks, sample_anchors, valid_anchors
from modelopt_spec.training.loss import LossWeights, Projection, draft_loss, gather_rows
from modelopt_spec.training.module import block_settings
from modelopt_spec.versions import versions

KINDS = ("dense", "dense+mhc", "dense+moe", "dense+mhc+moe", "moe_mhc")
WEIGHTS = LossWeights(ce=0.1, tv=0.9, confidence=1.0)


@dataclass(frozen=True)
class MoESizes:
    """Experts, streams and latent attention beside :class:`StepSizes`; active widths add up to its MLP's."""

    experts: int = 8
    chosen: int = 2
    width: int = 512
    streams: int = 4
    iterations: int = 20
    q_rank: int = 128
    o_groups: int = 4
    o_rank: int = 128


def backbone(kind: str, sizes: StepSizes, moe: MoESizes) -> dict[str, Any]:
    """The backbone section of one kind."""
    section: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    experts = {
        "num_experts": moe.experts,
        "experts_per_token": moe.chosen,
        "intermediate_size": moe.width,
        "scoring": "sqrtsoftplus",
        "normalize_weights": True,
        "routed_scaling_factor": 1.0,
    }
    streams = {"streams": moe.streams, "sinkhorn_iterations": moe.iterations, "eps": 1e-6}
    if kind == "moe_mhc":
        latent = {
            "q_lora_rank": moe.q_rank,
            "qk_rope_head_dim": 32,
            "o_groups": moe.o_groups,
            "o_lora_rank": moe.o_rank,
        }
        return section | {
            "type": "moe_mhc",
            "num_key_value_heads": 1,
            "sliding_window": 128,
            "hyper_connection": streams,
            "moe": experts,
            "latent_attention": latent,
        }
    section["num_key_value_heads"] = sizes.kv_heads
    if "mhc" in kind:
        section |= {"residual": "mhc", "hyper_connection": streams}
    if "moe" in kind:
        section |= {"mlp": "moe", "moe": experts}
    return section


def build(kind: str, sizes: StepSizes, moe: MoESizes) -> Drafter:
    """A drafter of one kind with the vanilla head, bound to a target that is an embedding and an output projection."""
    torch.manual_seed(0)
    config = DSparkConfig(
        block_size=sizes.block,
        target_layer_ids=(2, 5),
        mask_token_id=sizes.vocab - 1,
        vocab_size=sizes.vocab,
        target_hidden_size=sizes.hidden,
        num_target_layers=8,
        head={"type": "vanilla", "rank": sizes.rank},
        backbone=backbone(kind, sizes, moe),
    )
    drafter = build_drafter(config)
    target: Any = CachedTarget(sizes)
    drafter.bind(target)
    return drafter


def mlp_flops(kind: str, sizes: StepSizes, moe: MoESizes) -> float:
    """Forward and backward of all layers' MLPs: every slot passes k routed experts, the shared one and the router."""
    rows = sizes.anchors * sizes.block
    if "moe" not in kind:
        return 3 * 2.0 * sizes.layers * rows * 3 * sizes.hidden * sizes.intermediate
    inner = 3 * sizes.hidden * moe.width * (moe.chosen + 1) + moe.experts * sizes.hidden
    return 3 * 2.0 * sizes.layers * rows * inner


def stream_flops(kind: str, sizes: StepSizes, moe: MoESizes) -> float:
    """Forward and backward of the projections of all streams, of their collapse and of their mixing.

    The first connection reads embeddings, which need no gradient.
    """
    if "mhc" not in kind:
        return 0.0
    rows, n, d = sizes.anchors * sizes.block, moe.streams, sizes.hidden
    reading, mixing, writing = (2 + n) * n * n * d + n * d, n * n * d, n * d
    collapse = n * n * d + n * d
    total = 3 * (2 * sizes.layers * (reading + mixing + writing) + collapse) - (reading + mixing)
    return 2.0 * rows * total


def attention_flops(sizes: StepSizes, moe: MoESizes, context_pairs: int) -> float:
    """Forward and backward of latent attention: q and output through their ranks, one key/value head, the scores.

    The first layer reads embeddings, which need no gradient.
    """
    rows, d, heads = sizes.anchors * sizes.block, sizes.hidden, sizes.heads * sizes.head_dim
    slot = d * moe.q_rank + moe.q_rank * heads + d * sizes.head_dim
    slot += heads * moe.o_rank + moe.o_groups * moe.o_rank * d
    context = sizes.seq * d * sizes.head_dim
    scores = 2 * (context_pairs + rows * sizes.block) * heads
    unneeded = rows * d * (moe.q_rank + sizes.head_dim)
    return 2.0 * (3 * sizes.layers * (rows * slot + context + scores) - unneeded)


def step_flops(kind: str, sizes: StepSizes, moe: MoESizes, counts: dict[str, int]) -> float:
    """What one step cannot do without: the dense step's, with other MLPs, attention and residuals put in."""
    plain = replace(sizes, layers=0) if kind == "moe_mhc" else sizes
    total = needed_flops(plain, "vanilla", **counts) + mlp_flops(kind, sizes, moe) + stream_flops(kind, sizes, moe)
    if kind == "moe_mhc":
        return total + attention_flops(sizes, moe, counts["context_pairs"])
    return total - mlp_flops("dense", sizes, moe)


def make_step(kind: str, sizes: StepSizes, moe: MoESizes) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """The whole step and its backbone alone, and the counts that the floor is made of."""
    drafter, inputs = build(kind, sizes, moe), make_inputs(sizes)
    settings = block_settings(drafter, LossConfig(), sizes.anchors)
    anchors, keep = sample_anchors(
        valid_anchors(inputs["loss_mask"])[:, : sizes.seq], sizes.anchors, torch.Generator().manual_seed(0)
    )
    features = TargetFeatures(inputs["taps"], inputs["last_hidden"])

    def blocks() -> BlockBatch:
        return make_blocks(inputs["input_ids"], inputs["loss_mask"], anchors, keep, settings)

    def whole() -> None:
        drafter.zero_grad(set_to_none=True)
        batch = blocks()
        rows = gather_rows(drafter(features, batch), batch, features.last_hidden)
        draft_loss(rows, Projection.of(drafter), WEIGHTS, None).loss.backward()

    batch = blocks()
    cotangent = torch.randn(1, sizes.anchors, sizes.block, sizes.hidden, generator=torch.Generator().manual_seed(1))

    def backbone_alone() -> None:
        drafter.zero_grad(set_to_none=True)
        hidden, _ = drafter.encode(drafter.context(features.taps), batch, None)
        hidden.backward(cotangent)

    window = drafter.config.backbone.sliding_window or sizes.seq
    counts = {
        "slots": int(batch.supervised.sum()),
        "positions": batch.target_positions[batch.supervised].unique().numel(),
        "context_pairs": int(anchors.clamp(max=window).sum()) * sizes.block,
    }
    return {"step": whole, "backbone": backbone_alone}, counts


def measure(kind: str, sizes: StepSizes, moe: MoESizes, repeats: int) -> dict[str, Any]:
    """Medians of repetitions, each beside the rate of a large product at that moment."""
    steps, counts = make_step(kind, sizes, moe)
    head = replace(sizes, layers=0, taps=0)
    flops = {"step": step_flops(kind, sizes, moe, counts)}
    flops["backbone"] = flops["step"] - needed_flops(head, "vanilla", **counts)
    over: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(repeats):
        for name, step in steps.items():
            rate = sgemm_rate()
            elapsed = spent_by(step).seconds
            seconds[name].append(elapsed)
            over[name].append(elapsed * rate / flops[name])
    return {
        "kind": kind,
        "sizes": asdict(sizes),
        "moe": asdict(moe),
        **counts,
        "gflop": {name: value / 1e9 for name, value in flops.items()},
        "seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "over_floor": {name: statistics.median(values) for name, values in over.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--anchors", default="64,256", help="N, comma separated")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results = []
    for anchors in (int(part) for part in options.anchors.split(",")):
        for kind in options.kinds.split(","):
            result = measure(kind, replace(StepSizes(), anchors=anchors), MoESizes(), options.repeats)
            results.append(result)
            over = result["over_floor"]
            print(
                f"{kind:14} N {anchors:3}  {result['seconds']['step']:.3f} s  step over floor {over['step']:.2f}  "
                f"backbone alone {over['backbone']:.2f}",
                flush=True,
            )
            (options.out / "moe_step.json").write_text(
                json.dumps({"versions": versions(), "repeats": options.repeats, "results": results}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
