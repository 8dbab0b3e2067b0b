"""The target's caches: rows of different lengths, windows, and states that cannot be cut back."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.row_cache import RowCache, cacheable_layers, layer_windows
from modelopt_spec.decoding.target_session import ReplaySession, RowSession, open_session
from modelopt_spec.errors import UnsupportedError
from modelopt_spec.targets.hf import HFTarget
from tests.decoding.oracle import propose
from tests.decoding.tiny import add_drafter, tiny_target


def mask_by_hand(lengths: list[int], count: int, window: int | None) -> torch.Tensor:
    """Query i of a row stands at its length + i and sees what is not behind it, at most ``window`` positions."""
    width = max(lengths) + count
    mask = torch.zeros(len(lengths), 1, count, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for query in range(count):
            for column in range(width):
                position = length + query
                near = window is None or position - column < window
                mask[row, 0, query, column] = column <= position and near
    return mask


@pytest.mark.parametrize("lengths", [[5, 5], [9, 2, 12], [30, 4]])
@pytest.mark.parametrize("additive", [False, True])
def test_masks(lengths: list[int], additive: bool):
    config = tiny_target("gemma3").config
    cache = RowCache(config, len(lengths), torch.device("cpu"))
    cache.advance(torch.tensor(lengths), lengths)
    masks = cache.masks(4, additive=additive, dtype=torch.float32)
    assert set(masks) == {"full_attention", "sliding_attention"}
    for kind, window in (("full_attention", None), ("sliding_attention", 6)):
        want = mask_by_hand(lengths, 4, window)
        got = masks[kind]
        # sliding layers leave out the columns that no query sees
        first = want.shape[-1] - got.shape[-1]
        assert first == 0 if window is None else first == max(0, min(lengths) - window + 1)
        assert not want[..., :first].any()
        seen = got == 0 if additive else got
        assert torch.equal(seen, want[..., first:])


def test_rows_keep_and_overwrite():
    config = tiny_target("llama").config
    cache = RowCache(config, 2, torch.device("cpu"))

    def step(value: float, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.full((2, 2, count, 8), value)
        return cache.update(new, new + 100, 0)

    step(1.0, 3)
    cache.advance(torch.tensor([3, 1]), [3, 1])
    keys, values = step(2.0, 2)
    assert keys[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2]
    assert keys[1, 0, :3, 0].tolist() == [1, 2, 2]
    assert values[1, 1, :3, 5].tolist() == [101, 102, 102]
    cache.advance(torch.tensor([1, 2]), [1, 2])
    keys, _ = step(3.0, 300)
    assert keys[0, 0, :5, 0].tolist() == [1, 1, 1, 2, 3]
    assert keys[1, 0, :4, 0].tolist() == [1, 2, 2, 3]
    cache.advance(torch.tensor([300, 300]), [300, 300])
    cache.select([1])
    assert cache.lengths.tolist() == [303]
    assert step_one(cache)[0, 0, :4, 0].tolist() == [1, 2, 2, 3]


def step_one(cache: RowCache) -> torch.Tensor:
    new = torch.zeros(1, 2, 1, 8)
    return cache.update(new, new, 0)[0]


def test_sliding_layers_return_only_what_can_be_seen():
    cache = RowCache(tiny_target("mistral").config, 1, torch.device("cpu"))
    for count, seen in ((20, 20), (3, 8), (1, 6)):
        new = torch.zeros(1, 2, count, 8)
        assert cache.update(new, new, 0)[0].shape[2] == seen
        assert cache.get_mask_sizes(count, 0)[0] == seen
        cache.advance(torch.tensor([count]), [count])


def test_layer_kinds():
    gemma = tiny_target("gemma3").config
    assert layer_windows(gemma) == [6, 6, None, 6, 6, None]
    assert cacheable_layers(gemma)
    hybrid = qwen3_next().config
    assert not cacheable_layers(hybrid)


def qwen3_next():
    """A hybrid with recurrent layers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_next",
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=None,
    )
    return spread(AutoModelForCausalLM.from_config(config))


def deepseek_v4():
    """Compressed attention and hyper-connections."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "deepseek_v4",
        vocab_size=61,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=16,
        qk_rope_head_dim=8,
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        index_n_heads=2,
        index_head_dim=8,
        index_topk=64,
        hc_mult=2,
        max_position_embeddings=256,
        eos_token_id=None,
        pad_token_id=None,
    )
    return spread(AutoModelForCausalLM.from_config(config))


def spread(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    model.generation_config.eos_token_id = None
    return model.eval()


@pytest.mark.parametrize("make", [qwen3_next, deepseek_v4])
def test_states_that_cannot_be_cut_back_are_replayed(make):
    model = make()
    ids = torch.randint(4, 61, (1, 11), generator=torch.Generator().manual_seed(0))
    truth = model.generate(ids, max_new_tokens=40, do_sample=False).tolist()
    add_drafter(model)
    assert isinstance(open_session(HFTarget(model), (1,), {}, 1), ReplaySession)
    assert generate(model, ids, max_new_tokens=40, do_sample=False).sequences.tolist() == truth
    propose(model, truth, wrong_share=0.3)
    result = generate(model, ids, max_new_tokens=40, do_sample=False)
    assert result.sequences.tolist() == truth
    assert result.tau > 1.5
    assert len({record.accepted for record in result.rounds}) > 2
    with pytest.raises(UnsupportedError, match="one prompt at a time"):
        generate(model, ids.expand(2, -1), max_new_tokens=4)


def test_replayed_tokens_are_settled_before_they_pile_up(monkeypatch):
    model = qwen3_next()
    ids = torch.randint(4, 61, (1, 7), generator=torch.Generator().manual_seed(1))
    truth = model.generate(ids, max_new_tokens=30, do_sample=False).tolist()
    propose(add_drafter(model), truth, wrong_share=1.0)
    monkeypatch.setattr(ReplaySession, "MAX_REPLAY", 4)
    fed: list[int] = []
    decoder = HFTarget(model).decoder
    handle = decoder.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert generate(model, ids, max_new_tokens=30, do_sample=False).sequences.tolist() == truth
    handle.remove()
    assert max(fed[1:]) <= 4 + 6
    assert min(fed[1:]) >= 1


def test_vision_language_wrapper():
    torch.manual_seed(0)
    text = {
        "model_type": "gemma3_text",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 8,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = spread(AutoModelForImageTextToText.from_config(config))
    ids = torch.randint(4, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    truth = [model.generate(row[None], max_new_tokens=12, do_sample=False)[0].tolist() for row in ids]
    propose(add_drafter(model), truth, wrong_share=0.3)
    assert generate(model, ids, max_new_tokens=12, do_sample=False).sequences.tolist() == truth


def test_a_model_that_ignores_row_masks_is_refused_in_batches(monkeypatch):
    model = add_drafter(tiny_target())
    decoder = HFTarget(model).decoder
    forward = type(decoder).forward

    def deaf(self, *args, attention_mask=None, **kwargs):
        return forward(self, *args, attention_mask=None, **kwargs)

    monkeypatch.setattr(type(decoder), "forward", deaf)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with pytest.raises(UnsupportedError, match="would not be lossless"):
        generate(model, ids, max_new_tokens=4)
    assert len(generate(model, ids[:1], max_new_tokens=4).outputs[0]) == 4


def test_attention_without_row_masks_is_refused_in_batches():
    model = add_drafter(tiny_target())
    model.config._attn_implementation = "flash_attention_2"
    target = HFTarget(model)
    with pytest.raises(UnsupportedError, match="attn_implementation='sdpa'"):
        open_session(target, (1,), {}, 2)
    assert isinstance(open_session(target, (1,), {}, 1), RowSession)
