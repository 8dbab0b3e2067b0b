"""The tiling of a plan: all that is visible is multiplied, little else, and layers share the work."""

import torch
from hypothesis import given, settings

from modelopt_spec.drafter.attention_groups import group_blocks
from modelopt_spec.drafter.attention_plan import plan_blocks
from modelopt_spec.drafter.attention_reference import visible_keys
from tests.drafter.attention_cases import Case, cases


def cells(case: Case, row: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each (slot in ascending order of anchors, position) of a row is multiplied, and its summed bias."""
    plan = case.plan
    times = torch.zeros(case.blocks * case.slots, width)
    bias = torch.zeros(case.blocks * case.slots, width)
    for group in group_blocks(plan, 1, case.kv_heads, case.dim)[row]:
        rows = times[group.rows]
        for strip in group.strips:
            rows[strip.rows, strip.context] += 1
        for hole in group.holes:
            rows[hole.rows, hole.context] += 1000
        low = min((s.context.start - s.columns.start for s in (*group.strips, *group.holes)), default=0)
        tile = bias[group.rows, low : low + group.width].view(group.size, case.slots, group.width)
        for edge in group.edges:
            tile[..., edge.columns] += edge.bias.squeeze(2)
    return times, bias


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_strips_edges_and_holes_make_up_the_mask(case: Case):
    plan = case.plan
    seen = plan.sort(visible_keys(plan))[..., : case.length].flatten(1, 2)
    for row in range(case.batch):
        times, bias = cells(case, row, case.length)
        assert torch.equal((times == 1) & (bias == 0), seen[row])
        assert set(times.unique().tolist()) <= {0, 1, 1000}
        # a cell of a tile is in exactly one strip or hole
        for group in group_blocks(plan, 1, case.kv_heads, case.dim)[row]:
            assert (times[group.rows] > 0).sum() == group.size * case.slots * group.width


def test_hardly_more_is_multiplied_than_the_mask_asks_for():
    for count, length, window in (
        (32, 512, None),
        (256, 512, None),
        (32, 2048, None),
        (256, 2048, None),
        (64, 2048, 256),
    ):
        generator = torch.Generator().manual_seed(count)
        anchors = torch.randperm(length, generator=generator)[:count].sort().values.unsqueeze(0)
        keep = torch.ones_like(anchors, dtype=torch.bool)
        plan = plan_blocks(anchors, keep, block_size=8, seq_len=length, window=window)
        needed = int((plan.anchors - plan.first_visible()[..., 0]).sum()) * 16
        groups = group_blocks(plan, 2, 4, 64)[0]
        strips = [strip for group in groups for strip in group.strips]
        worked = sum((s.rows.stop - s.rows.start) * (s.context.stop - s.context.start) for s in strips)
        assert needed <= worked <= 1.3 * needed, (count, length, window)
        assert len(groups) <= count / 4 + 1


def test_groups_are_made_once_for_all_layers():
    plan = Case(blocks=9, length=100).plan
    assert group_blocks(plan, 2, 2, 4) is group_blocks(plan, 2, 2, 4)
    assert group_blocks(plan, 1, 2, 4) is not group_blocks(plan, 2, 2, 4)


def test_padding_blocks_are_in_no_group():
    plan = plan_blocks(
        torch.tensor([[5, 3, 9, 0]]), torch.tensor([[True, False, True, False]]), block_size=2, seq_len=10
    )
    assert plan.order.tolist() == [[0, 2, 1, 3]]
    assert sum(group.size for group in group_blocks(plan, 1, 1, 4)[0]) == 2
    x = torch.randn(1, 4, 2)
    assert torch.equal(plan.unsort(plan.sort(x)), x)
