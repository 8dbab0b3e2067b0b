"""Round tables and cost tables with known properties."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelopt_spec.scheduling.cost import AdditiveCostTable
from modelopt_spec.scheduling.rounds import RoundTable, rounds_from_records


def round_records(
    *, gamma: int = 4, prompts: int = 60, rounds: int = 30, overconfidence: float = 1.8, seed: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rounds whose true acceptance logits are the recorded ones divided by ``overconfidence``."""
    rng = np.random.default_rng(seed)
    records = []
    for prompt in range(prompts):
        ease = rng.normal(0.9, 0.8)
        for number in range(rounds):
            truth = ease + rng.normal(0.0, 1.0, gamma)
            passed = rng.random(gamma) < 1.0 / (1.0 + np.exp(-truth))
            accepted = int(np.cumprod(passed).sum())
            records.append(
                {
                    "prompt": prompt,
                    "round": number,
                    "position": 10 + 3 * number,
                    "drafted": list(range(gamma)),
                    "accepted": accepted,
                    "committed": accepted + 1,
                    "confidence_logits": (overconfidence * truth).tolist(),
                    "context_tokens": 10 + 3 * number,
                }
            )
    return {"kind": "mtsp.rounds", "version": 1, "gamma": gamma}, records


def round_table(**options: Any) -> RoundTable:
    return rounds_from_records(*round_records(**options))


def memory_bound_cost(knee: int = 32, last: int = 2048) -> AdditiveCostTable:
    """Tokens cost nothing up to a knee, then 0.05 ms each; drafting costs 2 ms."""
    tokens = (1, knee, last)
    return AdditiveCostTable(
        bias_seconds=0.010,
        request_probes=(1, 256),
        alpha_seconds=(0.0, 0.002),
        token_probes=tokens,
        theta_seconds=(0.0, 0.0, 5e-5 * (last - knee)),
        draft_seconds=(0.002, 0.002),
    )
