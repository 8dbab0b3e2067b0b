"""One question, one answer: what ``mtsp generate`` calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelopt_spec.data.chat import render_prompt
from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.measure import check_tokenizer, end_tokens
from modelopt_spec.errors import DataError

__all__ = ["answer"]


def answer(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    *,
    raw: bool = False,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stop_strings: list[str] | None = None,
    streamer: Any = None,
    scheduler: Any = None,
) -> dict[str, Any]:
    """Answer a user message.

    Args:
        model: a model with a drafter.
        tokenizer: the target's.
        prompt: the message, rendered with the target's chat template; continued as it stands if ``raw``.
        raw: no chat template.
        num_draft_tokens: draft tokens a round; default all of the trained block.
        max_new_tokens: limit of the answer.
        temperature: 0 is greedy.
        top_p: as in transformers.
        top_k: as in transformers; sampled answers use the whole vocabulary unless it is given.
        seed: of the sampling.
        stop_strings: texts that end the answer.
        streamer: see :func:`~modelopt_spec.decoding.generate.generate`.
        scheduler: a length policy, or the path of a ``scheduler.json``.

    Returns:
        ``text``, ``new_tokens``, ``rounds``, ``tau`` (None where no round was needed), ``tokens_per_second``,
        ``stopped``, ``token_ids``.
    """
    if not isinstance(prompt, str):
        raise DataError(f"the prompt is {str(prompt)[:80]!r}, a {type(prompt).__name__}: give one user message as text")
    if not prompt:
        raise DataError("the prompt is empty: there is nothing to answer")
    check_tokenizer(tokenizer)
    if raw:
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        ids = render_prompt([{"role": "user", "content": prompt}], tokenizer)
    result = generate(
        model,
        torch.tensor([ids]),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k is None else top_k,
        num_draft_tokens=num_draft_tokens,
        eos_token_id=list(end_tokens(model, tokenizer)),
        stop_strings=stop_strings,
        tokenizer=tokenizer,
        seed=seed,
        streamer=streamer,
        scheduler=scheduler,
    )
    tokens = list(result.outputs[0])
    return {
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "new_tokens": len(tokens),
        "rounds": len(result.rounds),
        "tau": result.tau if result.rounds else None,
        "tokens_per_second": len(tokens) / result.timings.total,
        "stopped": result.stopped[0],
        "token_ids": tokens,
    }
