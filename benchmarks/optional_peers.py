"""One drafter step of speculators 0.9 and SpecForge 0.2, where they are installed.

Both are imported when they are asked for; neither is a dependency of this project. On a CPU speculators runs its eager
losses (the fused ones need Triton), SpecForge its sdpa attention. Each draws its own anchors, as many as ours.

    pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0      # and what they import
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from benchmarks.step_sizes import Step, StepSizes

__all__ = ["OPTIONAL_PEERS", "installed"]

TAPS = [2, 5]


def installed(name: str) -> bool:
    """Whether the peer can be imported."""
    return find_spec(name) is not None


def _layers(sizes: StepSizes, **more: Any) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.intermediate,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        **more,
    )
    config._attn_implementation = "sdpa"
    return config


def _freeze(*modules: nn.Module) -> None:
    """The target's own modules: no gradient, weights of a usual size."""
    for module in modules:
        for parameter in module.parameters():
            parameter.requires_grad_(False)
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)


def speculators_step(head: str, sizes: StepSizes, inputs: dict[str, Tensor]) -> Step | None:
    """DFlash (none) and DSpark (vanilla, gated, rnn); it has no Domino."""
    if head == "gru":
        return None
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    plain = head == "none"
    common: dict[str, Any] = {
        "transformer_layer_config": _layers(sizes),
        "draft_vocab_size": sizes.vocab,
        "block_size": sizes.block,
        "aux_hidden_state_layer_ids": TAPS,
        "mask_token_id": sizes.vocab - 1,
        "sample_from_anchor": True,
        "speculators_config": SpeculatorsConfig(
            algorithm="dflash" if plain else "dspark",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=sizes.block)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="bench", architectures=["Qwen3ForCausalLM"]),
        ),
    }
    if plain:
        model = DFlashDraftModel(DFlashSpeculatorConfig(**common))
    else:
        model = DSparkDraftModel(DSparkSpeculatorConfig(**common, markov_rank=sizes.rank, markov_head_type=head))
    _freeze(model.embed_tokens, model.lm_head, model.verifier_lm_head, model.verifier_norm)
    model.train()
    losses: dict[str, Any] = {"loss_config": resolve_loss_config("ce", "eager")}
    if not plain:
        losses["loss_config"] = resolve_loss_config('{"ce": 0.1, "tv": 0.9}', "eager")
        losses["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]

    def work() -> None:
        documents = torch.zeros_like(inputs["input_ids"])
        arguments = (inputs["taps"], inputs["input_ids"], inputs["loss_mask"], inputs["last_hidden"], documents)
        model(*arguments, max_anchors=sizes.anchors, **losses)[1].backward()

    return Step(model, work)


def specforge_step(head: str, sizes: StepSizes, inputs: dict[str, Tensor]) -> Step:
    """DFlash (none), DSpark (vanilla, gated, rnn) and Domino (gru)."""
    from specforge.algorithms.common import dflash_family_model as family
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.modeling.draft.domino import DominoDraftModel
    from specforge.modeling.draft.dspark import DSparkDraftModel

    method: dict[str, Any] = {"target_layer_ids": TAPS, "mask_token_id": sizes.vocab - 1}
    if head == "gru":
        method |= {"emb_dim": sizes.rank, "gru_hidden_dim": 2 * sizes.rank, "shift_label": True}
    elif head != "none":
        method |= {"markov_rank": sizes.rank, "markov_head_type": head}
        method |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    layers = _layers(sizes, num_target_layers=8, block_size=sizes.block, dflash_config=method)
    embedding, output = nn.Embedding(sizes.vocab, sizes.hidden), nn.Linear(sizes.hidden, sizes.vocab, bias=False)
    _freeze(embedding, output)
    kinds: dict[str, tuple[Any, Any]] = {
        "none": (DFlashDraftModel, family.OnlineDFlashModel),
        "gru": (DominoDraftModel, family.OnlineDominoModel),
    }
    draft, wrapper = kinds.get(head, (DSparkDraftModel, family.OnlineDSparkModel))
    settings: dict[str, Any] = {"block_size": sizes.block, "attention_backend": "sdpa", "num_anchors": sizes.anchors}
    if head == "gru":
        settings["shift_label"] = True
    model = wrapper(draft(layers), output, embedding, sizes.vocab - 1, loss_decay_gamma=4.0, **settings)
    model.train()
    more: dict[str, Any] = {"lambda_base": 0.4} if head == "gru" else {}
    if head in ("vanilla", "gated", "rnn"):
        more["target_last_hidden_states"] = inputs["last_hidden"]

    def work() -> None:
        model(inputs["input_ids"], inputs["taps"], inputs["loss_mask"].float(), **more)[0].backward()

    return Step(model, work)


OPTIONAL_PEERS = {"speculators": speculators_step, "specforge": specforge_step}
