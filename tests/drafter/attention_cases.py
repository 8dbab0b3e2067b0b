"""Random block attention problems, and the rules of visibility written out for one pair of positions."""

from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from modelopt_spec.drafter.attention import BlockAttentionPlan, plan_blocks

NAMES = ("q", "k_ctx", "v_ctx", "k_blk", "v_blk")


@dataclass
class Case:
    """One problem; ``tensors`` are q, k_ctx, v_ctx, k_blk, v_blk and, if asked for, the sinks."""

    seed: int = 0
    batch: int = 1
    blocks: int = 3
    slots: int = 4
    kv_heads: int = 2
    repeat: int = 2
    dim: int = 4
    length: int = 30
    causal: bool = False
    window: int | None = None
    window_rule: str = "block"
    with_sinks: bool = False
    with_start: bool = False
    padding: float = 0.0
    ordered: bool = True
    spread: int | None = None
    """Anchors are drawn from the first ``spread`` positions: few of them make duplicates and overlaps."""
    scale: float = 0.4
    dtype: torch.dtype = torch.float64
    plan: BlockAttentionPlan = field(init=False, repr=False)
    tensors: tuple[Tensor, ...] = field(init=False, repr=False)

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.batch, self.blocks)
        anchors = torch.randint(min(self.length, self.spread or self.length) + 1, shape, generator=generator)
        keep = torch.rand(shape, generator=generator) >= self.padding
        if self.ordered:
            anchors, keep = anchors.sort(1).values, keep.sort(1, descending=True).values
        start = torch.randint(self.length + 1, shape, generator=generator) if self.with_start else None
        self.plan = plan_blocks(
            anchors,
            keep,
            start,
            block_size=self.slots,
            seq_len=self.length,
            causal=self.causal,
            window=self.window,
            window_rule=self.window_rule,
        )
        heads, block = self.kv_heads * self.repeat, (*shape, self.slots)
        context = (self.batch, self.length, self.kv_heads, self.dim)
        shapes = [(*block, heads, self.dim), context, context, *[(*block, self.kv_heads, self.dim)] * 2]
        shapes += [(heads,)] if self.with_sinks else []
        self.tensors = tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype) for s in shapes)

    def like(self, **changes) -> "Case":
        return replace(self, **changes)

    def run(self, attention, tensors=None, **options) -> Tensor:
        tensors = self.tensors if tensors is None else tensors
        sinks = tensors[5] if self.with_sinks else None
        return attention(*tensors[:5], self.plan, scale=self.scale, sinks=sinks, **options)

    def gradients(self, attention, **options) -> dict[str, Tensor]:
        """The output and the gradient of every input, for a random gradient of the output."""
        inputs = tuple(x.clone().requires_grad_() for x in self.tensors)
        out = self.run(attention, inputs, **options)
        generator = torch.Generator().manual_seed(self.seed + 1)
        grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
        names = (*NAMES, "sinks")[: len(inputs)]
        return {"out": out.detach(), **dict(zip(names, torch.autograd.grad(out, inputs, grad), strict=True))}


def sees_context(plan: BlockAttentionPlan, row: int, block: int, slot: int, position: int) -> bool:
    """Whether a slot sees a context position, in words of the rules."""
    anchor, start = int(plan.anchors[row, block]), int(plan.context_start[row, block])
    if not plan.keep[row, block] or not start <= position < anchor:
        return False
    if plan.window is None:
        return True
    if plan.window_rule == "block":
        return position in range(anchor - plan.window, anchor)
    return (anchor + slot) - position < plan.window


def sees_slot(plan: BlockAttentionPlan, slot: int, other: int) -> bool:
    """Whether a slot sees another one of its block, in words of the rules."""
    if plan.causal and other > slot:
        return False
    return plan.window is None or plan.window_rule == "block" or slot - other < plan.window


def cases(**fixed):
    """Hypothesis strategy: any small case."""
    free = {
        "seed": st.integers(0, 10**6),
        "batch": st.integers(1, 3),
        "blocks": st.sampled_from([1, 2, 3, 7, 20]),
        "slots": st.sampled_from([1, 2, 4, 5]),
        "kv_heads": st.sampled_from([1, 2, 3]),
        "repeat": st.sampled_from([1, 2, 4]),
        "dim": st.sampled_from([2, 4, 8]),
        "length": st.sampled_from([1, 5, 40, 150]),
        "causal": st.booleans(),
        "window": st.sampled_from([None, None, 1, 2, 3, 8, 60]),
        "window_rule": st.sampled_from(["block", "query"]),
        "with_sinks": st.booleans(),
        "with_start": st.booleans(),
        "padding": st.sampled_from([0.0, 0.3, 1.0]),
        "ordered": st.booleans(),
        "spread": st.sampled_from([None, None, 0, 4]),
    }
    return st.builds(Case, **{**free, **{name: st.just(value) for name, value in fixed.items()}})
