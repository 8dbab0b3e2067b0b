"""Jobs of test_megatron_loss.py: what the vocabulary-parallel loss computes, and what it never holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jobs_train import ANCHORS, SEED, TOTAL, batches_of, both_sides
from megatron_tiny import gpt_model, hf_config, initialize
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelopt_spec.config import LossConfig
from modelopt_spec.drafter.drafter import build_drafter
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.megatron import MegatronTarget
from modelopt_spec.targets.megatron_vocab import load_whole_state_dict, whole_tensor
from modelopt_spec.training import megatron as training
from modelopt_spec.training.blocks import make_blocks
from modelopt_spec.training.loss import LossWeights, draft_loss, gather_rows
from modelopt_spec.training.module import block_settings

GOLDEN = Path(__file__).resolve().parent / "data" / "deepspec_dspark_vanilla.json"


class LargestTensor(TorchDispatchMode):
    """Remembers the tensors with the most elements that operations made, whatever became of them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: tuple[int, str, tuple[int, ...]] = (0, "", ())
        self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, (tensor.numel(), str(func), tuple(tensor.shape)))
                if tensor.dim() > 1:
                    self.widest = max(self.widest, tensor.shape[-1])
        return result


def memory(tp: int, vocab: int, mode: str) -> dict[str, Any]:
    """One training step's largest tensor, its widest rows, and the number of supervised slots."""
    model, _, loss = both_sides("qwen3", mode, {"tp": tp, "config": {"vocab_size": vocab, "num_hidden_layers": 8}})
    step = training.MegatronForwardStep(model, loss, 4 * ANCHORS, seed=SEED, total_steps=TOTAL)
    wrapped = training.wrap_for_training(model, step)
    model.train()
    wrapped.zero_grad_buffer()
    with LargestTensor() as seen:
        training._run(step, wrapped, batches_of(0, 0, 1, length=64), forward_only=False)
    report = step.report()
    return {"elements": seen.largest, "widest": seen.widest, "slots": report.slots}


def golden(tp: int, through_module: bool = False) -> dict[str, float]:
    """Relative differences from the golden case's loss, terms, acceptance and gradients.

    ``through_module`` hooks the output layer, as a quantised one would be: its weight may then not be read.
    """
    initialize(tp)
    case, tensors = json.loads(GOLDEN.read_text()), load_file(GOLDEN.with_suffix(".safetensors"))
    given = case["config"]
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
    config = hf_config("qwen3", **{name: given[name] for name in names}, num_hidden_layers=given["num_target_layers"])
    model = gpt_model(None, config)
    target = MegatronTarget(model)
    with torch.no_grad():
        shard = target.vocab_shard
        model.embedding.word_embeddings.weight.copy_(shard.take(tensors["embed_tokens.weight"]))
        model.output_layer.weight.copy_(shard.take(tensors["lm_head.weight"]))

    if through_module:
        model.output_layer.register_forward_hook(lambda module, args, output: output)
        assert target.output_weight_shard() is None
    from tests.golden.build import case_config

    drafter = build_drafter(case_config(case, tensors))
    drafter.bind(target)
    target.attached(drafter)
    load_whole_state_dict(
        drafter, {n: tensors[n] for n in case["weights"] if n not in ("embed_tokens.weight", "lm_head.weight")}
    )
    settings = block_settings(drafter, LossConfig(ce=1.0, decay=given["loss_decay_gamma"]), given["num_anchors"])
    blocks = make_blocks(
        tensors["in.input_ids"],
        tensors["in.loss_mask"],
        tensors["in.anchor_positions"],
        tensors["in.block_keep_mask"].bool(),
        settings,
    )
    output = drafter(TargetFeatures(tensors["in.target_hidden_states"]), blocks)
    rows = gather_rows(output, blocks, tensors["in.target_last_hidden_states"])
    weights = LossWeights(
        ce=given["ce_loss_alpha"], tv=given["l1_loss_alpha"], confidence=given["confidence_head_alpha"]
    )
    result = draft_loss(rows, training.projection_of(drafter), weights)
    result.loss.backward()
    accept = tensors["out.accept_rate"].reshape(-1, given["block_size"])[rows.blocks, rows.slots]
    got: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "loss": (result.loss.detach(), tensors["out.loss"]),
        "acceptance": (result.acceptance, accept),
    }
    for name, key in {"ce": "ce", "tv": "l1", "confidence": "confidence"}.items():
        got[f"{name} sum"] = (result.terms[name].total, tensors[f"out.{key}_loss_num"])
        got[f"{name} weight"] = (result.terms[name].weight, tensors[f"out.{key}_loss_den"])
    for name, parameter in drafter.named_parameters():
        got[f"grad {name}"] = (whole_tensor(drafter, name, parameter.grad), tensors[f"grad.{name}"])
    return {
        name: float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))
        for name, (ours, theirs) in got.items()
    }
