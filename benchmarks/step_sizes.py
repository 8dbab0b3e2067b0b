"""Sizes of the benchmarked drafter step, its needed multiplications, and peak tensor bytes of a function.

Legend: S context positions, N anchors, K slots, M supervised slots, P distinct target positions, D hidden, R rank,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class StepSizes:
    """One drafter step on one row."""

    vocab: int = 32000
    hidden: int = 512
    layers: int = 2
    block: int = 8
    seq: int = 512
    rank: int = 256
    anchors: int = 64
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 1536
    taps: int = 2


def needed_flops(sizes: StepSizes, head: str, slots: int, positions: int, context_pairs: int) -> float:
    """Floating-point operations that the step cannot do without (2 for each multiply-add), forward and backward.

    Args:
        slots: M, supervised slots. positions: P, distinct positions whose target logits are compared with (0 without
            such a term). context_pairs: sum over slots of the context keys that each sees.

    Every matrix is counted once forward, once for its input's gradient and once for its weight's, but: ``fc`` and the
    first projections of frozen embeddings need no input gradient, the frozen output projection no weight gradient, the
    target's logits neither. Slots of blocks all run through the backbone, supervised or not.
    """
    s, d, v, r = sizes, sizes.hidden, sizes.vocab, sizes.rank
    rows = s.anchors * s.block
    q_width, kv_width = s.heads * s.head_dim, s.kv_heads * s.head_dim
    total = 2 * 2.0 * s.seq * s.taps * d * d
    for layer in range(s.layers):
        passes = 3 if layer else 2
        total += passes * 2.0 * rows * d * (q_width + 2 * kv_width)
        total += 3 * 2.0 * s.seq * d * 2 * kv_width
        total += 3 * 2.0 * rows * (q_width * d + 3 * d * s.intermediate)
        total += 3 * 2.0 * 2 * (context_pairs + rows * s.block) * q_width
    corrected = head != "none"
    total += 2 * 2.0 * slots * v * (d + (r if corrected else 0)) + 2.0 * positions * v * d
    if corrected:
        total += 2.0 * slots * v * r
    if head == "gated":
        total += 3 * 2.0 * rows * (d + r) * r
    if head == "rnn":
        total += 3 * 2.0 * rows * (d + 2 * r) * 3 * r
    if head == "gru":
        total += 2 * 2.0 * rows * d * 6 * r + 3 * 2.0 * rows * 2 * r * 6 * r + 3 * 2.0 * rows * (d + 2 * r) * r
    return total


def sgemm_rate() -> float:
    """Floating-point operations a CPU second of a large float32 matrix product, now and on this thread count."""
    import time

    a, b, c = torch.randn(1536, 1536), torch.randn(1536, 1536), torch.empty(1536, 1536)
    torch.mm(a, b, out=c)
    started = time.process_time()
    torch.mm(a, b, out=c)
    torch.mm(a, b, out=c)
    return 2 * 2.0 * 1536**3 / (time.process_time() - started)


@dataclass(frozen=True)
class Step:
    """One training step of somebody's drafter."""

    module: nn.Module
    work: Callable[[], None]
    """Forward and backward."""

    def __call__(self) -> None:
        """The step as training takes it: old gradients are dropped first."""
        self.module.zero_grad(set_to_none=True)
        self.work()


def peak_bytes(step: Step) -> int:
    """Most bytes of tensors that a step holds above what stood before it, its gradients included.

    Old gradients are freed first: freeing them inside would count below nothing.
    """
    step.module.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step.work()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    held = peak = 0
    for event in events:
        held += event.nbytes()
        peak = max(peak, held)
    return peak
