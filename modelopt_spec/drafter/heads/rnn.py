"""DSpark's RNN Markov head (DSpark paper, section 3.1; DeepSpec's `joint_proj`): a bias with memory of the block.

[g_k; c_k; o_k] = J [s_{k-1}; e_k; h_k],    e_k = W1[x_{k-1}],    s_{-1} = 0
s_k = sigmoid(g_k) s_{k-1} + (1 - sigmoid(g_k)) tanh(c_k),    u_k = tanh(o_k)

u_k comes from the old state's projection, not from the new state. Only the product with s must wait for the slot
before: the parts of J that read e and h are applied to the whole block at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modelopt_spec.config import HeadConfig
from modelopt_spec.drafter.heads.base import HeadContext, register_head
from modelopt_spec.drafter.heads.vanilla import VanillaMarkovHead


@register_head("rnn")
class RNNMarkovHead(VanillaMarkovHead):
    """u_k = tanh(o_k) with a gated state s_k of rank R."""

    def __init__(self, config: HeadConfig, context: HeadContext) -> None:
        super().__init__(config, context)
        self.joint_proj = nn.Linear(2 * config.rank + context.hidden_size, 3 * config.rank)

    def initial_state(self, hidden: Tensor) -> Tensor:
        """s_{-1} = 0, [..., R]."""
        return hidden.new_zeros((*hidden.shape[:-1], self.config.rank))

    def _inputs(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """The part of J that does not wait for the state: [...], [..., D] -> [..., 3R]."""
        inputs = torch.cat([self.prev_embedding(prev_ids), hidden], dim=-1)
        return F.linear(inputs, self.joint_proj.weight[:, self.config.rank :], self.joint_proj.bias)

    def _advance(self, inputs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: inputs [..., 3R], s_{k-1} [..., R] -> o_k before its tanh [..., R], s_k [..., R]."""
        gate, candidate, output = (inputs + F.linear(state, self.joint_proj.weight[:, : self.config.rank])).chunk(3, -1)
        return output, torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))

    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """[..., K], [..., K, D] -> [..., K, R]."""
        inputs = self._inputs(prev_ids, hidden)
        state = self.initial_state(inputs[..., 0, :])
        outputs = [state] * self.first_slot
        for k in range(self.first_slot, inputs.shape[-2]):
            output, state = self._advance(inputs[..., k, :], state)
            outputs.append(output)
        return torch.tanh(torch.stack(outputs, dim=-2))

    def step(self, prev_id: Tensor, hidden: Tensor, state: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """[...], [..., D], s_{k-1} [..., R] -> u_k [..., R], s_k [..., R]."""
        output, state = self._advance(self._inputs(prev_id, hidden), state)
        return torch.tanh(output), state
