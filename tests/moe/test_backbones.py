"""Both backbones with experts and streams: what a block sees, decoding, the plain start, checkpointing, saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import modelopt_spec as mtsp
from modelopt_spec.conversion import convert
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.drafter.hyper_connections import HyperConnection, StreamCollapse
from modelopt_spec.drafter.moe_dense import MixedDenseDrafter
from modelopt_spec.drafter.moe_mhc import MoEMHCDrafter
from modelopt_spec.errors import ConfigError
from modelopt_spec.records import TargetFeatures
from tests.moe.blocks import ANCHORS, KEEP, batch, loss_of
from tests.moe.v4 import shake, v4_drafter, v4_target
from tests.tiny import tiny

BACKBONES: dict[str, dict[str, Any]] = {
    "v4 block window": {"type": "moe_mhc", "sliding_window": 6, "window_rule": "block", "num_layers": 2},
    "v4 query window": {"type": "moe_mhc", "sliding_window": 6, "window_rule": "query", "num_layers": 2},
    "mhc": {"residual": "mhc", "num_layers": 2},
    "moe": {"mlp": "moe", "num_layers": 2},
    "mhc and moe": {"residual": "mhc", "mlp": "moe", "num_layers": 2, "hyper_connection": {"streams": 3}},
}


def _drafter(name: str, *, mode: str = "dspark", dtype: torch.dtype = torch.float32, seed: int = 5) -> Drafter:
    model = tiny("llama", dtype=dtype)
    head = {"type": "gru", "rank": 8} if mode == "domino" else {"type": "vanilla", "rank": 8}
    config = {"block_size": 5, "mask_token_id": 90, "head": head, "backbone": BACKBONES[name]}
    convert(model, (mode, config), quiet=True)
    drafter: Any = model.drafter
    shake(drafter, 0.2, seed)
    return drafter.eval()


@pytest.mark.parametrize("name", BACKBONES)
def test_kind(name: str) -> None:
    drafter = _drafter(name)
    assert isinstance(drafter, MoEMHCDrafter if name.startswith("v4") else MixedDenseDrafter)


@pytest.mark.parametrize("name", BACKBONES)
def test_a_block_sees_its_context_and_itself_only(name: str) -> None:
    drafter = _drafter(name)
    _, features, blocks = batch(drafter)
    with torch.no_grad():
        before = drafter(features, blocks)
        for row in range(2):
            for block in range(ANCHORS.shape[1]):
                if not KEEP[row, block]:
                    continue
                anchor = int(ANCHORS[row, block])
                taps = features.taps.clone()
                taps[row, anchor:] = 7.0
                taps[1 - row] = -3.0
                ids = blocks.input_ids.clone()
                others = torch.ones(ids.shape[:2], dtype=torch.bool)
                others[row, block] = False
                ids[others] = 11
                after = drafter(TargetFeatures(taps, features.last_hidden), replace(blocks, input_ids=ids))
                torch.testing.assert_close(after.hidden[row, block], before.hidden[row, block])
                assert before.confidence is not None and after.confidence is not None
                torch.testing.assert_close(after.confidence[row, block], before.confidence[row, block])


@pytest.mark.parametrize("name", BACKBONES)
def test_a_window_hides_older_context(name: str) -> None:
    drafter = _drafter(name)
    _, features, blocks = batch(drafter)
    anchor, window = 17, drafter.config.backbone.sliding_window
    taps = features.taps.clone()
    taps[0, : anchor - 6] = 5.0
    with torch.no_grad():
        before, after = drafter(features, blocks), drafter(replace(features, taps=taps), blocks)
    difference = (after.hidden[0, 3] - before.hidden[0, 3]).abs().amax(-1)
    assert bool((difference < 1e-6).all()) if window is not None else bool((difference > 1e-4).all())
    if window is not None:
        taps = features.taps.clone()
        taps[0, : anchor - 5] = 5.0
        with torch.no_grad():
            moved = (drafter(replace(features, taps=taps), blocks).hidden[0, 3] - before.hidden[0, 3]).abs().amax(-1)
        block_rule = drafter.config.backbone.window_rule == "block"
        assert float(moved.max()) > 1e-4 if block_rule else bool((moved < 1e-6).all())


@pytest.mark.parametrize("name", BACKBONES)
def test_decoding_equals_the_training_pass(name: str) -> None:
    """Rows of different lengths, the context written in two parts with entries that do not count."""
    drafter = _drafter(name, dtype=torch.float64)
    _, features, blocks = batch(drafter)
    with torch.no_grad():
        hidden, before_norm = drafter.encode(drafter.context(features.taps), blocks, None)
        for first, second in ((0, 1), (1, 2), (3, 2)):
            ends = torch.tensor([int(ANCHORS[0, first]), int(ANCHORS[1, second])])
            cache = drafter.new_cache(2)
            split = int(ends.min()) // 2
            drafter.extend(cache, features.taps[:, : split + 2], torch.tensor([split, split]))
            rest = torch.stack([features.taps[row].roll(-split, 0) for row in range(2)])
            drafter.extend(cache, rest[:, : int(ends.max()) - split + 1], ends - split)
            slots = torch.stack([blocks.input_ids[0, first], blocks.input_ids[1, second]])
            got, got_before = drafter.decode(cache, slots)
            for row, block in enumerate((first, second)):
                torch.testing.assert_close(got[row], hidden[row, block], rtol=0, atol=1e-10)
                torch.testing.assert_close(got_before[row], before_norm[row, block], rtol=0, atol=1e-10)


def test_confidence_of_v4_reads_the_hidden_before_the_norm_without_bias() -> None:
    drafter = _drafter("v4 block window")
    _, features, blocks = batch(drafter)
    assert drafter.confidence_head is not None and drafter.confidence_head.proj.bias is None
    with torch.no_grad():
        hidden, before = drafter.encode(drafter.context(features.taps), blocks, None)
        torch.testing.assert_close(drafter.norm(before), hidden)
        embedded = drafter.head.prev_embedding(blocks.prev_ids)
        want = torch.cat([before, embedded], dim=-1) @ drafter.confidence_head.proj.weight[0]
        torch.testing.assert_close(drafter(features, blocks).confidence, want)
    assert not torch.allclose(before, hidden)


def test_the_token_embedding_is_looked_up_once_and_before_the_backbone() -> None:
    """Each lookup costs a dense gradient, and what is looked up first is differentiated last."""
    drafter = _drafter("v4 block window")
    _, features, blocks = batch(drafter)
    called: list[str] = []
    drafter.head.markov_w1.register_forward_hook(lambda *_: called.append("lookup"))
    drafter.main_proj.register_forward_hook(lambda *_: called.append("backbone"))
    drafter(features, blocks)
    assert called == ["lookup", "backbone"]


# ---- the start -----------------------------------------------------------------------------------------------------


def _pair(streams: int, mode: str = "dspark") -> tuple[Drafter, Drafter]:
    """A dense drafter, and a hyper-connected one with fresh connections and the dense one's weights."""
    made = []
    for residual in ({}, {"residual": "mhc", "hyper_connection": {"streams": streams}}):
        torch.manual_seed(3)
        model = tiny("llama")
        head = {"type": "gru", "rank": 8} if mode == "domino" else {"type": "vanilla", "rank": 8}
        backbone = {"num_layers": 2, **residual}
        config = {"block_size": 5, "mask_token_id": 90, "head": head, "backbone": backbone}
        convert(model, (mode, config), quiet=True)
        made.append(model.drafter)
    dense, mixed = made
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
    left = mixed.load_state_dict(dense.state_dict(), strict=False)
    assert left.unexpected_keys == [] and all("hc" in name for name in left.missing_keys)
    return dense, mixed


@pytest.mark.parametrize("streams", [1, 2, 4])
@pytest.mark.parametrize("mode", ["dspark", "domino"])
def test_fresh_streams_are_the_plain_network(streams: int, mode: str) -> None:
    """Same function, same loss, same gradients of every weight that both have."""
    dense, mixed = _pair(streams, mode)
    _, features, blocks = batch(dense)
    torch.testing.assert_close(mixed(features, blocks).hidden, dense(features, blocks).hidden, rtol=1e-4, atol=1e-5)
    weights = {"ce": 0.6, "base_ce": 0.4} if mode == "domino" else {}
    losses = [loss_of(drafter, features, blocks, **weights) for drafter in (dense, mixed)]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=2e-6)
    for loss in losses:
        loss.backward()
    theirs = dict(mixed.named_parameters())
    for name, parameter in dense.named_parameters():
        assert parameter.grad is not None and theirs[name].grad is not None
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    if streams > 1:
        moved = [theirs[name].grad for name in theirs if name.endswith(("attn_hc.scale", "ffn_hc.scale", "hc_scale"))]
        assert all(gradient is not None and float(gradient.abs().max()) > 0 for gradient in moved)


@torch.no_grad()
def test_one_stream_with_identity_mappings_is_the_dense_network_to_the_last_digits() -> None:
    """pre = post = comb = 1 in float64: the same loss to 1e-10."""
    dense, mixed = (drafter.double() for drafter in _pair(1))
    dense.target.model.double()  # type: ignore[union-attr]
    mixed.target.model.double()  # type: ignore[union-attr]
    connections = [m for m in mixed.modules() if isinstance(m, HyperConnection | StreamCollapse)]
    assert len(connections) == 5
    for module in connections:
        module.eps = 1e-14
        base = module.base if isinstance(module, HyperConnection) else module.hc_base
        base[0] = 40.0
    _, features, blocks = batch(dense)
    streams = torch.randn(3, 1, dense.config.backbone.hidden_size or 0, dtype=torch.float64)
    _, mixing = connections[0](streams)
    for mapping in mixing:
        torch.testing.assert_close(mapping, torch.ones_like(mapping), rtol=0, atol=1e-12)
    losses = [float(loss_of(drafter, features, blocks)) for drafter in (dense, mixed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)


def test_fresh_v4_stages_are_a_plain_residual_network() -> None:
    """x + attention(norm(x)), then x + experts(norm(x)), stage by stage: the streams stay copies of one another."""
    model = v4_target()
    convert(model, ("dspark", {"block_size": 4, "mask_token_id": 90, "backbone": {"type": "moe_mhc"}}), quiet=True)
    drafter: Any = model.drafter
    _, features, blocks = batch(drafter)
    with torch.no_grad():
        hidden, _ = drafter.encode(drafter.context(features.taps), blocks, None)
        from modelopt_spec.drafter.attention import plan_blocks

        backbone, context = drafter.config.backbone, drafter.context(features.taps)
        plan = plan_blocks(
            blocks.anchors,
            blocks.keep,
            blocks.context_start,
            block_size=4,
            seq_len=context.shape[1],
            window=backbone.sliding_window,
            window_rule=backbone.window_rule,
        )
        slots = drafter.rotary(blocks.position_ids, context.dtype)
        places = drafter.rotary(torch.arange(context.shape[1]).expand(2, -1), context.dtype)
        x = drafter.embed(blocks.input_ids)
        for stage in drafter.layers:
            x = x + stage.self_attn(stage.input_layernorm(x), context, slots, places, plan)
            x = x + stage.mlp(stage.post_attention_layernorm(x))[0]
    torch.testing.assert_close(hidden[KEEP], drafter.norm(x)[KEEP], rtol=1e-4, atol=1e-5)


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKBONES)
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    drafter = _drafter(name).train()
    _, features, blocks = batch(drafter)
    found = []
    for on in (False, True):
        drafter.gradient_checkpointing = on
        drafter.zero_grad()
        loss_of(drafter, features, blocks).backward()
        gradients = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
        routing = getattr(drafter, "routing", ())
        found.append((gradients, [stats.counts.clone() for stats in routing]))
    assert found[0][0].keys() == found[1][0].keys()
    for parameter, gradient in found[0][0].items():
        torch.testing.assert_close(found[1][0][parameter], gradient, msg=parameter)
    for before, after in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(before, after)
    if drafter.config.backbone.moe is not None:
        moe, tokens = drafter.config.backbone.moe, int(KEEP.sum()) * 5
        assert len(found[0][1]) == 2 and float(found[0][1][0].sum()) == tokens * (moe.experts_per_token or 0)


def test_weight_decay_leaves_streams_alone() -> None:
    drafter = _drafter("mhc and moe")
    names = drafter.no_decay_names()
    known = dict(drafter.named_parameters())
    assert names <= set(known) and all("hc" in name for name in names)
    assert {name for name in known if "_hc." in name or name.startswith("hc_head")} == names
    assert "layers.0.self_attn.sinks" in _drafter("v4 block window").no_decay_names()


@pytest.mark.parametrize("name", ["v4 block window", "mhc and moe"])
def test_saving_keeps_every_bit(name: str, tmp_path: Path) -> None:
    model = tiny("llama", dtype=torch.bfloat16)
    config = {"block_size": 5, "mask_token_id": 90, "backbone": BACKBONES[name]}
    convert(model, ("dspark", config), quiet=True)
    shake(model.drafter, 0.3)
    types = {n: t.dtype for n, t in model.drafter.state_dict().items()}
    assert types["hc_head.hc_fn"] == torch.float32 and model.drafter.dtype == torch.bfloat16
    mtsp.save(model, tmp_path / "kept")
    other = mtsp.restore(tiny("llama", dtype=torch.bfloat16), tmp_path / "kept")
    for parameter, tensor in model.drafter.state_dict().items():
        loaded = other.drafter.state_dict()[parameter]
        assert loaded.dtype == types[parameter] and torch.equal(loaded, tensor), parameter


def test_generate_is_lossless_with_v4_target_and_drafter() -> None:
    """Compressed layers keep a state that cannot be cut back: generation still commits the target's own tokens."""
    model = v4_target()
    v4_drafter(model, backbone={"num_layers": 2})
    ids = torch.randint(3, 80, (1, 9), generator=torch.Generator().manual_seed(0))
    mine = mtsp.generate(model, ids, max_new_tokens=10, temperature=0.0)
    want = ids
    with torch.no_grad():
        for _ in range(10):
            want = torch.cat([want, model(input_ids=want, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert mine.sequences[0, : want.shape[1]].tolist() == want[0].tolist()
    assert sum(record.committed for record in mine.rounds) >= 9


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        ({"type": "moe_mhc", "num_key_value_heads": 2}, "one shared key/value head"),
        ({"type": "moe_mhc", "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"type": "moe_mhc", "residual": "plain"}, "leave residual"),
        ({"moe": {"num_experts": 4}}, "mlp: moe"),
        ({"hyper_connection": {"streams": 2}}, "residual: mhc"),
        ({"mlp": "moe", "moe": {"num_experts": 2, "experts_per_token": 3}}, "more than num_experts"),
        ({"type": "moe_mhc", "latent_attention": {"o_groups": 3}}, "does not divide"),
        ({"type": "moe_mhc", "moe": {"num_shared_experts": 2}}, "have 1"),
        ({"mlp": "moe", "moe": {"expert_per_token": 2}}, "experts_per_token"),
    ],
)
def test_bad_settings_say_what_to_do(backbone: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(tiny("llama"), ("dspark", {"mask_token_id": 90, "backbone": backbone}), quiet=True)
