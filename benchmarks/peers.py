"""The same drafter step in nvidia-modelopt, so that both are timed side by side in one process."""

from __future__ import annotations

import modelopt.torch.speculative as mtsp_peer
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.step_sizes import Step, StepSizes

HEADS = {
    "none": {"projector_type": "dflash"},
    "vanilla": {"projector_type": "dspark", "markov_head_type": "vanilla"},
    "gated": {"projector_type": "dspark", "markov_head_type": "gated"},
    "rnn": {"projector_type": "dspark", "markov_head_type": "rnn"},
    "gru": {"projector_type": "domino"},
}


def modelopt_step(head: str, sizes: StepSizes, inputs: dict[str, Tensor]) -> Step:
    """One forward and backward of nvidia-modelopt's drafter on cached features, as a function of nothing.

    The target is reduced to its embedding and output projection (ModelOpt's offline mode), as in ours. Its rotary
    settings and head counts are given explicitly: on transformers 5 it would otherwise build another draft than asked.
    """
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=1,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
        )
    )
    base.config.num_orig_hidden_layers = 8
    architecture = {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate_size": sizes.intermediate,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "target_layer_ids": [2, 5],
        "markov_rank": sizes.rank,
        "use_confidence_head": head in ("vanilla", "gated", "rnn"),
        "emb_dim": sizes.rank,
        "gru_hidden_dim": 2 * sizes.rank,
        "_attn_implementation": "sdpa",
        **HEADS[head],
    }
    config = {
        "dflash_offline": True,
        "dflash_block_size": sizes.block,
        "dflash_num_anchors": sizes.anchors,
        "dflash_mask_token_id": sizes.vocab - 1,
        "dflash_self_logit_distillation": False,
        "dflash_loss_objective": "decay",
        "dflash_loss_decay_factor": 4.0,
        "dflash_report_acc": False,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": architecture,
    }
    if head in ("vanilla", "gated", "rnn"):
        config["dflash_confidence_head_alpha"] = 1.0
    model = mtsp_peer.convert(base, [("dflash", config)])
    model.train()
    if head == "gru":
        model._lambda_base = 0.4
    outputs = {
        "aux_hidden_states": inputs["taps"],
        "base_model_hidden_states": inputs["last_hidden"],
    }

    def work() -> None:
        result = model(
            input_ids=inputs["input_ids"],
            attention_mask=torch.ones_like(inputs["input_ids"]),
            base_model_outputs=outputs,
            loss_mask=inputs["loss_mask"].float(),
        )
        result.loss.backward()

    return Step(model, work)
