"""Jobs of test_weights.py, run on every rank of a worker group."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_tiny import gpt_model, hf_config, hf_model, initialize

from modelopt_spec.targets.megatron_weights import RankLayout, gather_hf_weights, hf_to_megatron, load_hf_weights


def logits_and_roundtrip(
    family: str, tp: int = 1, pp: int = 1, ep: int = 1, sp: bool = False, **config_overrides: Any
) -> dict[str, Any]:
    """Largest difference of the logits from Hugging Face's, and of the weights after a round trip."""
    initialize(tp, pp, ep)
    config = hf_config(family, **config_overrides)
    reference = hf_model(config)
    model = gpt_model(reference, config, sp=sp)
    torch.manual_seed(7)
    ids = torch.randint(0, config.vocab_size, (2, 16))
    position_ids = torch.arange(16).expand(2, -1)

    def forward_step(data: Any, stage: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        return stage(ids, position_ids, None), lambda logits, non_loss_data=False: logits

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=model,
            num_microbatches=1,
            seq_length=16,
            micro_batch_size=2,
            forward_only=True,
            collect_non_loss_data=True,
        )
        expected = reference(ids).logits
    difference = None
    if parallel_state.is_pipeline_last_stage():
        rank = parallel_state.get_tensor_model_parallel_rank()
        width = outputs[0].shape[-1]
        shard = expected[..., rank * width : (rank + 1) * width]
        difference = float((outputs[0][..., : shard.shape[-1]] - shard).abs().max())
    gathered = gather_hf_weights(model, config)
    same = None
    if gathered is not None:
        state_dict = reference.state_dict()
        same = gathered.keys() == state_dict.keys() and all(torch.equal(gathered[k], state_dict[k]) for k in state_dict)
    return {"difference": difference, "roundtrip": same, "scale": float(expected.abs().max())}


def per_expert_names() -> bool:
    """A hub checkpoint stores each expert by itself; the same Megatron weights must come out."""
    initialize()
    config = hf_config("qwen3_moe")
    reference = hf_model(config)
    model = gpt_model(reference, config)
    separate = gather_hf_weights(model, config, fused_experts=False)
    assert separate is not None
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in separate
    layout = RankLayout.of(model)
    ours, theirs = (hf_to_megatron(weights, config, layout) for weights in (reference.state_dict(), separate))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def from_directory(directory: str) -> float:
    """Load from a saved Hugging Face directory; the difference of the last norm's weight."""
    initialize()
    config = hf_config("qwen3")
    reference = hf_model(config)
    reference.save_pretrained(directory)
    model = gpt_model(None, config)
    load_hf_weights(model, directory, config)
    names = {"decoder.final_layernorm.weight": "model.norm.weight", "output_layer.weight": "lm_head.weight"}
    return max(
        float(
            (model.state_dict()[here][: len(reference.state_dict()[there])] - reference.state_dict()[there]).abs().max()
        )
        for here, there in names.items()
    )
