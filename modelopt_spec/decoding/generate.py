"""Lossless speculative generation: the target's own tokens, several for each of its passes.

A round drafts one block behind the anchor (the last committed token), runs the target once over the anchor and the
drafts, commits the drafts that stand and one token that the target chose, and gives the features of exactly the newly
committed positions to the drafter. The prompt's features come from the prefill; the first token is the target's.

What comes out: greedy, the tokens of ``model.generate``; sampled, tokens of the same distribution. In floating point,
a pass over several tokens or rows may round differently from one over a single token, so outputs can part where the
target's two best logits tie within its own rounding: practically never in float32, now and then in bfloat16.

Legend: B rows, R rows still running, S prompt length, n draft tokens sent to the target, T taps, V vocabulary.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from modelopt_spec.arguments import whole_number
from modelopt_spec.decoding.decode_loop import DecodeLoop, Timings
from modelopt_spec.decoding.draft import BlockDrafter, check_num_draft_tokens
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.rounds import RoundRecord
from modelopt_spec.decoding.settings import FROM_CONFIG, Settings, resolve_settings
from modelopt_spec.decoding.stopping import StopRules
from modelopt_spec.decoding.target_session import open_session
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError, DataError, UnsupportedError
from modelopt_spec.scheduling.api import open_policy
from modelopt_spec.targets.hf import HFTarget

__all__ = ["GenerateResult", "generate"]


@dataclass(frozen=True)
class GenerateResult:
    """Output of :func:`generate`."""

    sequences: Tensor
    """[B, S + longest output] prompts as given, outputs behind them, padded with ``pad_token_id``: what
    ``model.generate`` returns."""
    outputs: tuple[tuple[int, ...], ...]
    """New tokens of each row, end-of-text token included."""
    stopped: tuple[str, ...]
    """Why each row ended: eos, stop_string or length."""
    rounds: tuple[RoundRecord, ...] = ()
    """All verification rounds, in the order in which they ran."""
    timings: Timings = field(default_factory=Timings)

    @property
    def tau(self) -> float:
        """Tokens committed a round, bonus token included; NaN when no round was needed."""
        return sum(r.committed for r in self.rounds) / len(self.rounds) if self.rounds else float("nan")


def generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | None = None,
    generation_config: GenerationConfig | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    num_draft_tokens: int | None = None,
    eos_token_id: int | Sequence[int] | None = FROM_CONFIG,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    scheduler: Any = None,
    return_rounds: bool = True,
    record_probabilities: bool = False,
    random: RowRandom | None = None,
) -> GenerateResult:
    """Generate with a converted model: ``model.generate``'s tokens, with the drafter's help.

    Args:
        model: a model with a drafter (:func:`modelopt_spec.convert` or :func:`modelopt_spec.restore`).
        input_ids: [B, S] prompts; shorter ones padded, on the left as transformers wants it.
        attention_mask: [B, S], 0 on padding. Without one, padding is recognised as transformers does.
        max_new_tokens: limit on the new tokens of a row.
        generation_config: of transformers, default the model's; the arguments here win over it.
        do_sample: sample instead of taking the most probable token.
        temperature: of the sampling; without do_sample it decides by itself (0 is greedy).
        top_k: as in transformers (which keeps 50 tokens unless told otherwise; 0 keeps all).
        top_p: as in transformers.
        num_draft_tokens: draft tokens a round, at most those of the trained block (the default).
        eos_token_id: tokens that end an output; None never stops early. Default: the generation config's.
        pad_token_id: fills shorter rows of the result.
        stop_strings: texts that end an output once they are complete.
        tokenizer: needed for stop_strings.
        seed: of the sampling. Row b of a seed draws the same numbers whatever else is in the batch.
        generator: gives the seed when there is none; default torch's global one.
        streamer: called ``streamer(row, new_tokens)`` as tokens are committed; for one prompt also a transformers
            streamer (``put`` and ``end``).
        scheduler: a length policy of :mod:`modelopt_spec.scheduling`, or the path of a ``scheduler.json`` of this
            drafter and machine; decides how many draft tokens of each row are sent to the target. The output stays the
            target's. Rows of one pass are padded to the longest.
        return_rounds: keep a record of every round.
        record_probabilities: with acceptance probabilities, which cost two softmaxes over the vocabulary a round.
        random: the source of chance itself, for tests.

    Returns:
        A :class:`GenerateResult`: sequences as ``model.generate`` gives them, new tokens and end of each row, and the
        record of every round.

    Raises:
        ConfigError: settings that contradict each other or the drafter. DataError: prompts that cannot be used.
        UnsupportedError: a generation config or a target that this cannot reproduce; the message says what.
    """
    drafter, target = _parts(model)
    _check_ids(input_ids)
    settings = resolve_settings(
        model,
        input_ids.shape[1],
        max_new_tokens=max_new_tokens,
        generation_config=generation_config,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        stop_strings=stop_strings,
        embedded_ids=target.shape.embedding_rows,
    )
    if seed is not None:
        whole_number("seed", seed, 0)
    count = check_num_draft_tokens(drafter, num_draft_tokens)
    scheduler = open_policy(scheduler, model, tokenizer, gamma=count)
    if scheduler is not None and getattr(scheduler, "gamma", count) not in (0, count):
        raise ConfigError(
            f"scheduler is for blocks of {scheduler.gamma} draft tokens, but {count} are drafted: calibrate one for "
            f"{count}, or pass num_draft_tokens={scheduler.gamma}"
        )
    prompts = _unpad(input_ids, attention_mask, settings)
    _check_range(prompts, target.shape.embedding_rows)
    _warn_beyond_positions(target.shape.max_position_embeddings, prompts, settings.max_new_tokens)
    if streamer is not None and not callable(streamer) and not hasattr(streamer, "put"):
        raise ConfigError(
            f"streamer is a {type(streamer).__name__}: pass a function of (row, new_tokens) or a transformers streamer"
        )
    if hasattr(streamer, "put") and len(prompts) > 1:
        raise ConfigError("a transformers streamer takes one prompt at a time: pass a function of (row, new_tokens)")
    random = random or RowRandom(len(prompts), seed, generator)
    stops = StopRules(settings, tokenizer)
    layer_ids = drafter.config.target_layer_ids or ()
    with torch.no_grad(), _evaluating(model), target.tapped(layer_ids) as taps:
        loop = DecodeLoop(
            target,
            open_session(target, layer_ids, taps, len(prompts)),
            BlockDrafter(drafter, len(prompts), count, settings.sampling, random),
            prompts,
            stops,
            scheduler=scheduler,
            on_tokens=_on_tokens(streamer, prompts),
            keep_rounds=return_rounds,
            keep_probabilities=record_probabilities and return_rounds,
        )
        loop.run()
    if hasattr(streamer, "end"):
        streamer.end()
    return GenerateResult(
        sequences=_join(input_ids, loop.outputs, settings.pad_token_id),
        outputs=tuple(tuple(output) for output in loop.outputs),
        stopped=tuple(loop.stopped),
        rounds=loop.records(),
        timings=loop.timings,
    )


def _on_tokens(streamer: Any, prompts: list[list[int]]) -> Any:
    """A function of (row, new tokens) for either kind of streamer; a transformers one is given the prompt first."""
    if not hasattr(streamer, "put"):
        return streamer
    streamer.put(torch.tensor(prompts))
    return lambda row, tokens: streamer.put(torch.tensor(tokens))


def _join(input_ids: Tensor, outputs: list[list[int]], pad_token_id: int) -> Tensor:
    """Prompts [B, S] and outputs -> [B, S + longest output]."""
    longest = max(len(output) for output in outputs)
    padded = [output + [pad_token_id] * (longest - len(output)) for output in outputs]
    return torch.cat([input_ids, torch.tensor(padded, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def _parts(model: nn.Module) -> tuple[Drafter, HFTarget]:
    drafter = getattr(model, "drafter", None)
    if not isinstance(drafter, Drafter):
        raise ConfigError(f"this {type(model).__name__} has no drafter: call modelopt_spec.convert or restore first")
    if not isinstance(drafter.target, HFTarget):
        raise UnsupportedError(
            f"the target is a {type(drafter.target).__name__}: generation runs on Hugging Face targets; save the "
            "drafter and restore it there"
        )
    return drafter, drafter.target


def _warn_beyond_positions(positions: int, prompts: Sequence[Any], max_new_tokens: int) -> None:
    if 0 < positions < max(map(len, prompts), default=0) + max_new_tokens:
        warnings.warn(
            f"the prompt and max_new_tokens {max_new_tokens} reach beyond the {positions} positions that the target "
            "was made for: what it says there may be nonsense",
            stacklevel=3,
        )


def _check_range(prompts: list[list[int]], rows: int) -> None:
    """Every id of the prompts has an embedding; padding may hold anything."""
    smallest, largest = min(map(min, prompts)), max(map(max, prompts))
    if smallest < 0:
        raise DataError(
            f"input_ids holds id {smallest}: ids run from 0 to {rows - 1}; mark padding in attention_mask, not by a "
            "negative id"
        )
    if largest >= rows:
        raise DataError(
            f"input_ids holds id {largest}, but the target embeds {rows} ids: the tokenizer belongs to another model"
        )


def _check_ids(input_ids: Any) -> None:
    if not isinstance(input_ids, Tensor):
        raise DataError(
            f"input_ids is a {type(input_ids).__name__}: it must be a tensor of token ids, [prompts, tokens] "
            '(tokenizer(..., return_tensors="pt")["input_ids"])'
        )
    if input_ids.ndim != 2 or not input_ids.numel():
        raise DataError(f"input_ids has shape {tuple(input_ids.shape)}: it must be [prompts, tokens], neither 0")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise DataError(f"input_ids is of type {input_ids.dtype}: token ids are integers (torch.long)")


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Everything in eval mode; each module's own mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _unpad(input_ids: Tensor, attention_mask: Tensor | None, settings: Settings) -> list[list[int]]:
    """Prompts without their padding."""
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
        if settings.pad_marks_padding and len(input_ids) > 1:
            attention_mask = (input_ids != settings.pad_token_id).long()
    if not isinstance(attention_mask, Tensor):
        raise DataError(f"attention_mask is a {type(attention_mask).__name__}: it must be a tensor like input_ids")
    if attention_mask.shape != input_ids.shape:
        raise DataError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}: "
            "they must agree"
        )
    prompts = []
    for row, (ids, mask) in enumerate(zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)):
        if not any(mask):
            raise DataError(f"prompt {row} holds no token: its attention_mask is all 0")
        first, last = mask.index(True), len(mask) - mask[::-1].index(True)
        if not all(mask[first:last]):
            raise DataError(f"attention_mask of prompt {row} has a hole: only padding at the ends can be left out")
        prompts.append(ids[first:last])
    return prompts
