"""Decoding steps of a real model, for the cost measurement: one verification pass or one draft pass at a time.

Our own decoding pads the rows of a step to its longest draft, so only uniform steps exist: R rows of n draft tokens are
R (1 + n) batch tokens. A step is what a greedy round does but for the draft pass: the target's pass with its logits,
the decision, the one wait for the device, and projecting the new features for the drafter. Nothing is kept, so each
step sees the same context.

Legend: R rows, S context length, n draft tokens, T taps, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelopt_spec.decoding.draft import BlockDrafter, check_num_draft_tokens
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import Sampling
from modelopt_spec.decoding.target_session import RowSession, open_session
from modelopt_spec.decoding.verify import verify_greedy
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import ConfigError, UnsupportedError
from modelopt_spec.targets.hf import HFTarget

__all__ = ["ModelSteps"]


@dataclass(frozen=True)
class _Batch:
    """R rows that all stand behind the same context."""

    session: RowSession
    drafting: BlockDrafter
    anchors: Tensor
    tokens: Tensor
    """[R, 1 + n] the anchor and draft tokens."""


class ModelSteps:
    """Steps of a converted model; use inside ``with steps.running():``."""

    def __init__(self, model: nn.Module, num_draft_tokens: int | None = None, seed: int = 0) -> None:
        drafter = getattr(model, "drafter", None)
        if not isinstance(drafter, Drafter):
            raise ConfigError(f"this {type(model).__name__} has no drafter: convert it or restore a checkpoint first")
        if not isinstance(drafter.target, HFTarget):
            raise UnsupportedError(
                f"the target is a {type(drafter.target).__name__}: steps are timed on Hugging Face targets"
            )
        self.gamma = check_num_draft_tokens(drafter, num_draft_tokens)
        self._model, self._drafter, self._target = model, drafter, drafter.target
        self._generator = torch.Generator().manual_seed(seed)
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._taps: dict[int, Tensor] = {}

    @contextmanager
    def running(self) -> Iterator[ModelSteps]:
        """Everything in eval mode, without gradients, with the taps' hooks in place; caches are freed at the end."""
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            with torch.no_grad(), self._target.tapped(self._drafter.config.target_layer_ids or ()) as taps:
                self._taps = taps
                yield self
        finally:
            self._batches.clear()
            for module in training:
                module.training = True

    def step(self, requests: int, tokens: int, context: int) -> None:
        """One verification step of ``requests`` rows and ``tokens`` batch tokens, to its end."""
        width, rest = divmod(tokens, requests)
        if rest or not 1 <= width <= self.gamma + 1:
            raise ConfigError(
                f"{tokens} batch tokens for {requests} requests: this decoding pads, so a request has 1 to "
                f"{self.gamma + 1} tokens, all the same"
            )
        batch = self._batch(requests, context)
        ids = batch.tokens[:, :width]
        passed = batch.session.verify(ids)
        verdict = verify_greedy(self._target.logits(passed.hidden), ids[:, 1:], [width - 1] * requests)
        verdict.accepted.tolist()
        batch.drafting.extend(passed.taps, torch.zeros(requests, dtype=torch.long, device=self._target.device))
        self._wait()

    def draft(self, requests: int, context: int) -> None:
        """One draft pass of ``requests`` rows."""
        batch = self._batch(requests, context)
        batch.drafting.draft(batch.anchors, range(requests), [self.gamma] * requests).tokens.tolist()
        self._wait()

    def plain(self, requests: int, context: int) -> None:
        """One step without drafting: a token a row."""
        self.step(requests, requests, context)

    def _batch(self, requests: int, context: int) -> _Batch:
        """Prefill one row and copy it, once for each shape."""
        key = (requests, context)
        if key not in self._batches:
            self._batches[key] = self._prefill(requests, context)
        return self._batches[key]

    def _prefill(self, requests: int, context: int) -> _Batch:
        layer_ids = self._drafter.config.target_layer_ids or ()
        if requests > 1:
            open_session(self._target, layer_ids, self._taps, requests)
        session = open_session(self._target, layer_ids, self._taps, 1)
        if not isinstance(session, RowSession):
            raise UnsupportedError(
                f"{type(self._target.model).__name__} keeps states that cannot be cut back: its steps cannot be "
                "repeated for a measurement"
            )
        vocabulary = self._target.shape.vocab_size
        ids = torch.randint(0, vocabulary, (1, context), generator=self._generator).to(self._target.device)
        passed = session.prefill(ids, [context])
        session.select([0] * requests)
        sampling, random = Sampling(temperature=0.0), RowRandom(requests, 0)
        drafting = BlockDrafter(self._drafter, requests, self.gamma, sampling, random)
        drafting.extend(passed.taps.expand(requests, -1, -1))
        tokens = torch.randint(0, vocabulary, (requests, 1 + self.gamma), generator=self._generator)
        tokens = tokens.to(self._target.device)
        return _Batch(session, drafting, tokens[:, 0], tokens)

    def _wait(self) -> None:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize()
