"""Every way that chance can go in generate, walked through the real code, with the probability of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import Sampling, probabilities


@dataclass
class Path:
    """Choices made so far, and the probability of having made them."""

    choices: list[int]
    probability: float = 1.0
    taken: int = 0
    alternatives: list[tuple[list[int], float]] = field(default_factory=list)

    def choose(self, weights: list[float]) -> int:
        """Follow the script; behind its end take the first possible option and note the others."""
        if self.taken < len(self.choices):
            option = self.choices[self.taken]
        else:
            possible = [option for option, weight in enumerate(weights) if weight > 0]
            option = possible[0]
            self.alternatives += [([*self.choices, other], weights[other]) for other in possible[1:]]
            self.choices.append(option)
        self.taken += 1
        self.probability *= weights[option]
        return option


class ScriptedRandom(RowRandom):
    """Each row of a batch follows a path of its own."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def categorical(self, probabilities: Tensor, rows: Sequence[int], active: Sequence[bool] | None = None) -> Tensor:
        weights = (probabilities.double() / probabilities.double().sum(-1, keepdim=True)).tolist()
        active = [True] * len(rows) if active is None else active
        return torch.tensor(
            [self.paths[row].choose(w) if use else 0 for row, w, use in zip(rows, weights, active, strict=True)]
        )

    def accept(self, probability: Tensor, rows: Sequence[int], counts: Sequence[int]) -> Tensor:
        decided = torch.zeros(probability.shape, dtype=torch.bool)
        for index, (row, chances, count) in enumerate(zip(rows, probability.tolist(), counts, strict=True)):
            for slot, chance in enumerate(chances[:count]):
                # what would be decided behind the first rejection changes nothing
                if not self.paths[row].choose([1 - chance, chance]):
                    break
                decided[index, slot] = True
        return decided


def enumerate_outputs(
    run: Callable[[int, RowRandom], list[tuple[int, ...]]], batch: int = 512
) -> dict[tuple[int, ...], float]:
    """Probability of every output of ``run(rows, random)``, which returns the outputs of so many equal prompts."""
    waiting: list[list[int]] = [[]]
    total: dict[tuple[int, ...], float] = defaultdict(float)
    while waiting:
        paths = [Path(list(choices)) for choices in waiting[-batch:]]
        del waiting[-batch:]
        for path, output in zip(paths, run(len(paths), ScriptedRandom(paths)), strict=True):
            total[output] += path.probability
            waiting += [choices for choices, _ in path.alternatives]
    return dict(total)


def target_outputs(
    model: nn.Module, prompt: Tensor, count: int, sampling: Sampling, eos: int | None = None
) -> dict[tuple[int, ...], float]:
    """Probability of every output of plain sampling, token by token, without a cache."""
    total: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(count):
        grown: dict[tuple[int, ...], float] = {}
        for output, weight in total.items():
            if output and output[-1] == eos:
                grown[output] = weight
                continue
            ids = torch.cat([prompt, torch.tensor([output], dtype=torch.long)], dim=1)
            with torch.no_grad():
                step = probabilities(model(ids).logits[0, -1], sampling)
            for token, chance in enumerate(step.tolist()):
                if chance > 0:
                    grown[(*output, token)] = weight * chance
        total = grown
    return total
