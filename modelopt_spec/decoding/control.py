"""Cross-checks of an evaluation: the same rounds with target features of other positions, and plain decoding.

A drafter lives on the target's features. Fed with features of the same conversation but of random positions it must
accept less; if it does not, the features never reached it (wrong taps, a broken cache) or it never learnt to use them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.decoding.measure import Measured, MeasureSettings, generate_batch, measure, numbered, pad_prompts
from modelopt_spec.decoding.prompts import PromptFile
from modelopt_spec.decoding.settings import neutral_config
from modelopt_spec.decoding.statistics import count_prompts, paired_interval
from modelopt_spec.drafter.drafter import Drafter

__all__ = ["SAMPLE_PROMPTS", "run_baseline", "run_control", "shuffled_features"]

SAMPLE_PROMPTS = 6
"""Prompts of each file that the control and the baseline run on."""


@contextlib.contextmanager
def shuffled_features(drafter: Drafter, seed: int = 0) -> Iterator[None]:
    """Give a drafter, for each committed position, the features of a random committed position. One row at a time."""
    generator = torch.Generator().manual_seed(seed)
    extend = drafter.extend
    pools: dict[int, tuple[Any, Tensor]] = {}

    def extend_shuffled(cache: Any, taps: Tensor, counts: Tensor | None = None) -> None:
        seen = taps if id(cache) not in pools else torch.cat([pools[id(cache)][1], taps], dim=1)
        # the cache is held on to, so that its id stays its own
        pools[id(cache)] = (cache, seen)
        index = torch.randint(seen.shape[1], (taps.shape[1],), generator=generator).to(taps.device)
        extend(cache, seen[:, index], counts)

    drafter.extend = extend_shuffled  # type: ignore[method-assign]
    try:
        yield
    finally:
        del drafter.extend


def run_control(
    model: nn.Module,
    renderer: ChatRenderer,
    files: Sequence[PromptFile],
    settings: MeasureSettings,
    measured: Measured,
    warnings: list[str],
) -> dict[str, Any]:
    """The same prompts with shuffled target features; a warning unless tau falls, or where no round was needed."""
    drafter: Any = model.drafter
    sample = numbered(files, SAMPLE_PROMPTS)
    alone = replace(settings, batch_size=1, probabilities=False, scheduler=None)
    with shuffled_features(drafter, settings.seed):
        shuffled = count_prompts(measure(model, renderer, sample, alone).rounds)
    chosen = {number for number, _ in sample}
    straight = count_prompts([record for record in measured.rounds if record.prompt in chosen])
    tau_shuffled, tau = _tau(shuffled), _tau(straight)
    result: dict[str, Any] = {"prompts": len(sample), "tau": tau_shuffled, "tau_same_prompts": tau}
    if tau is None or tau_shuffled is None:
        warnings.append(
            f"control: the answers to {len(sample)} prompts needed no round (their first token comes from the target "
            f"alone; max_new_tokens is {settings.max_new_tokens}), so it says nothing: allow longer answers"
        )
        return result | {"difference_interval": None, "falls": None}
    bounds = paired_interval(shuffled, straight, seed=settings.seed)
    falls = (bounds[0] if bounds else tau - tau_shuffled) > 0
    if not falls:
        warnings.append(
            f"control: with shuffled target features tau is {tau_shuffled:.2f}, with the right ones {tau:.2f}: the "
            "taps do not reach the drafter (wrong layer ids, a broken cache), or it has not learnt to use them"
        )
    return result | {"difference_interval": bounds, "falls": bool(falls)}


def _tau(counts: dict[int, tuple[int, int]]) -> float | None:
    rounds = sum(number for number, _ in counts.values())
    return sum(tokens for _, tokens in counts.values()) / rounds if rounds else None


def run_baseline(
    model: Any, renderer: ChatRenderer, files: Sequence[PromptFile], settings: MeasureSettings, warnings: list[str]
) -> dict[str, Any]:
    """First turns of some prompts with and without the drafter, alternating: tokens a second, and equality."""
    sampling, ends = settings.sampling, list(settings.eos_token_ids)
    config = neutral_config(
        max_new_tokens=settings.max_new_tokens,
        do_sample=not sampling.greedy,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else 0,
        **({} if sampling.greedy else vars(sampling)),
    )
    timed = replace(settings, probabilities=False)
    plain_seconds = seconds = 0.0
    plain_tokens = tokens = equal = compared = 0
    sample = numbered(files, SAMPLE_PROMPTS)
    for start in range(0, len(sample), settings.batch_size):
        prompts = [d.prompt(renderer, 0, []) for _, d in sample[start : start + settings.batch_size]]
        ids, mask = (part.to(model.device) for part in pad_prompts(prompts))
        torch.manual_seed(settings.seed)
        begin = time.perf_counter()
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        plain_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        result = generate_batch(model, prompts, timed, settings.seed)
        seconds += time.perf_counter() - begin
        for row, ours in zip(output[:, ids.shape[1] :].tolist(), result.outputs, strict=True):
            length = next((i + 1 for i, token in enumerate(row) if token in settings.eos_token_ids), len(row))
            plain_tokens += length
            tokens += len(ours)
            compared += 1
            equal += row[:length] == list(ours)
    speeds = plain_tokens / plain_seconds, tokens / seconds
    share = equal / compared if sampling.greedy else None
    if share is not None and share < 1 and str(model.dtype) in ("torch.float32", "torch.float64"):
        warnings.append(
            f"baseline: {compared - equal} of {compared} greedy outputs differ from model.generate's in {model.dtype}: "
            "this target's passes over several tokens are not those over one"
        )
    return {
        "prompts": compared,
        "tokens_per_second": speeds[0],
        "speculative_tokens_per_second": speeds[1],
        "speedup": speeds[1] / speeds[0],
        "equal_outputs": share,
    }
