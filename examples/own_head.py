"""Your own correction head, from outside of the package: one class and one registration.

This one is a trigram head, ``u_k = W1[x_{k-1}] + W0[x_{k-2}]``: a bigram bias that also remembers the token before.
While decoding, the state is the embedding of the token before the last one.

    python examples/own_head.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import modelopt_spec as mtsp
from modelopt_spec.config import HeadConfig
from modelopt_spec.drafter.heads import HeadContext


@mtsp.register_head("trigram")
class TrigramHead(mtsp.CorrectionHead):
    """u_k = W1[x_{k-1}] + W0[x_{k-2}]; inside a block only: the first slot has no x_{k-2}."""

    def __init__(self, config: HeadConfig, context: HeadContext) -> None:
        super().__init__(config, context)
        self.last = nn.Embedding(context.vocab_size, config.rank)
        self.before = nn.Embedding(context.vocab_size, config.rank)
        self.project = nn.Linear(config.rank, context.draft_vocab_size, bias=False)

    @property
    def out(self) -> nn.Linear:
        """W_out, [V, R]."""
        return self.project

    def prev_embedding(self, prev_ids: Tensor) -> Tensor:
        """What a confidence head may read: [...] -> [..., R]."""
        return self.last(prev_ids)

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """A whole teacher-forced block: [..., K] -> [..., K, R]."""
        before = nn.functional.pad(self.before(prev_ids[..., :-1]), (0, 0, 1, 0))
        return self.last(prev_ids) + before

    def initial_state(self, hidden: Tensor) -> Tensor:
        """Nothing before the block: [..., R] of zeros."""
        return hidden.new_zeros((*hidden.shape[:-1], self.config.rank))

    def step(self, prev_id: Tensor, hidden: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Any]:
        """One slot while decoding: u_k, and what the next slot adds."""
        return self.last(prev_id) + state, self.before(prev_id)


def main() -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    mtsp.convert(model, ("dspark", {"head": {"type": "trigram", "rank": 16}, "mask_token_id": 63}))
    prompt = torch.arange(3, 13).unsqueeze(0)
    ours = mtsp.generate(model, prompt, max_new_tokens=12, do_sample=False, eos_token_id=None).sequences
    theirs = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    print("same tokens as the target alone:", torch.equal(ours, theirs))


if __name__ == "__main__":
    main()
