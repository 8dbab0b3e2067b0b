"""Jobs of test_megatron_target.py, run on every rank of a worker group."""

from __future__ import annotations

from typing import Any

import torch
from megatron_tiny import VOCAB, gpt_model, hf_config, hf_model, initialize

import modelopt_spec.conversion as mtsp
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.hf import HFTarget
from modelopt_spec.targets.megatron import MegatronTarget

TAPS = (-1, 1, 3, 5)


def features(
    family: str, tp: int = 1, pp: int = 1, ep: int = 1, sp: bool = False, **overrides: Any
) -> dict[str, float]:
    """Largest differences of features, embeddings and logits from Hugging Face's; empty off the last stage."""
    initialize(tp, pp, ep)
    config = hf_config(family, **overrides)
    reference = hf_model(config)
    model = gpt_model(reference, config, sp=sp)
    target = open_target(model)
    assert isinstance(target, MegatronTarget)
    target.sync_embedding()
    torch.manual_seed(7)
    ids = torch.randint(0, VOCAB, (2, 16))
    model.train()  # a training loop's mode must not matter
    ours = target.features(ids, TAPS, attention_mask=torch.ones_like(ids))
    assert model.decoder.training
    if not target.hosts_drafter:
        return {}
    plain = HFTarget(reference)
    theirs = plain.features(ids, TAPS)
    odd_ids = torch.randint(0, VOCAB, (3, 5))
    hidden = torch.randn(3, 5, config.hidden_size)
    assert ours.last_hidden is not None
    assert theirs.last_hidden is not None
    assert target.logits(hidden).shape == (3, 5, VOCAB)
    return {
        "taps": float((ours.taps - theirs.taps).abs().max() / theirs.taps.abs().max()),
        "last_hidden": float((ours.last_hidden - theirs.last_hidden).abs().max()),
        "embed": float((target.embed(odd_ids) - plain.embed(odd_ids)).abs().max()),
        "logits": float((target.logits(hidden) - plain.logits(hidden)).abs().max()),
    }


def logits_gradient(tp: int, sp: bool) -> float:
    """The gradient of the sharded logits with respect to the hidden state, against the whole projection's."""
    initialize(tp)
    config = hf_config("qwen3")
    reference = hf_model(config)
    target = open_target(gpt_model(reference, config, sp=sp))
    torch.manual_seed(3)
    hidden = torch.randn(5, config.hidden_size, requires_grad=True)
    weights = torch.randn(5, VOCAB)
    shard = target.vocab_shard
    (target.logits_shard(hidden) * weights[:, shard.start : shard.start + shard.width]).sum().backward()
    expected = weights @ reference.lm_head.weight
    return float((hidden.grad - expected).abs().max())


def same_defaults(pp: int) -> dict[str, Any]:
    """The resolved drafter configs of both sides, and whether a state dict moves between them."""
    initialize(1, pp)
    config = hf_config("llama", tie_word_embeddings=True)
    reference = hf_model(config)
    model = mtsp.convert(gpt_model(reference, config), ("dspark", {"mask_token_id": 96}), quiet=True)
    hf_side = mtsp.convert(reference, ("dspark", {"mask_token_id": 96}), quiet=True)
    drafter = getattr(model, "drafter", None)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    if drafter is None:
        return {"trainable": trainable}
    drafter.load_state_dict(hf_side.drafter.state_dict())
    return {
        "trainable": trainable,
        "ours": drafter.config.model_dump(mode="json"),
        "theirs": hf_side.drafter.config.model_dump(mode="json"),
    }


def _message(action: Any) -> str:
    try:
        action()
    except SpecError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    """Messages of everything that is refused on one rank."""
    initialize()
    config = hf_config("qwen3")
    model = gpt_model(None, config)
    target = MegatronTarget(model)
    ids = torch.zeros(2, 4, dtype=torch.long)
    left = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    right = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    target.features(ids, (1,), attention_mask=right)
    small = ("dspark", {"draft_vocab_size": 8, "mask_token_id": 5})
    return {
        "chunks": _message(lambda: mtsp.convert([model, model], "dspark")),  # type: ignore[arg-type]
        "left": _message(lambda: target.features(ids, (1,), attention_mask=left)),
        "packed": _message(lambda: target.features(ids, (1,), position_ids=torch.zeros_like(ids))),
        "mask": _message(lambda: target.features(ids, (1,), attention_mask=torch.ones(2, 1, 4, 4))),
        "vocabulary": _message(lambda: target.set_vocab_size(10_000)),
        "reduced": _message(lambda: mtsp.convert(model, small, quiet=True)),
    }


def context_parallel() -> str:
    """Message for a model with context parallelism (which only TransformerEngine's attention can build)."""
    initialize(cp=2)
    model = gpt_model(None, hf_config("qwen3"), context_parallel_size=1)
    model.config.context_parallel_size = 2
    return _message(lambda: MegatronTarget(model))


def odd_length() -> str:
    """Message for rows that do not divide over sequence-parallel ranks."""
    initialize(tp=2)
    target = MegatronTarget(gpt_model(None, hf_config("qwen3"), sp=True))
    return _message(lambda: target.features(torch.zeros(1, 5, dtype=torch.long), (1,)))


def padding_never_wins(tp: int) -> dict[str, Any]:
    """Rows that Megatron padded get huge weights: no logit may show them; ``multiple`` leaves one rank only padding."""
    initialize(tp)
    config = hf_config("qwen3")
    reference = hf_model(config)
    model = gpt_model(reference, config, vocab_multiple=128)
    target = MegatronTarget(model)
    shard = target.vocab_shard
    with torch.no_grad():
        model.output_layer.weight[shard.width :] = 1e3
    hidden = torch.ones(3, config.hidden_size)
    logits = target.logits(hidden)
    return {"width": shard.width, "same": torch.allclose(logits, reference.lm_head(hidden), atol=1e-5)}


def foreign_model() -> dict[str, Any]:
    """A GPTModel without ``hf_config``: the padded vocabulary by default, the real one when the config names it."""
    initialize()
    config = hf_config("qwen3")
    model = gpt_model(None, config)
    del model.hf_config
    default = open_target(model).shape
    converted = mtsp.convert(model, ("dspark", {"vocab_size": VOCAB, "mask_token_id": 96}), quiet=True)
    return {
        "padded": default.vocab_size,
        "named": converted.drafter.config.vocab_size,
        "rope_theta": default.rope_parameters["rope_theta"],
        "width": converted.drafter.target.vocab_shard.width,
    }
