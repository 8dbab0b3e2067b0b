"""What every correction head is: a rank-R latent u added to the logits through one vocabulary projection.

    logits_k = lm_head(h_k) + W_out u_k                                            (DESIGN: the one formula)

A head gives u for a whole teacher-forced block (`latents`) and slot by slot while decoding (`step`). It knows nothing
of losses, samplers or exporters. Register your own with :func:`register_head`.

Legend: K slots, D hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from modelopt_spec.config import HeadConfig
from modelopt_spec.conventions import BlockLayout, first_drafting_slot
from modelopt_spec.errors import ConfigError, nearest

__all__ = ["CorrectionHead", "HeadContext", "build_head", "head_names", "register_head"]


@dataclass(frozen=True)
class HeadContext:
    """What a head may know of the drafter that it belongs to."""

    hidden_size: int
    """D of the backbone."""
    vocab_size: int
    """V: ids that may stand before a slot."""
    draft_vocab_size: int
    """Rows of W_out; equal to V unless the draft has a reduced vocabulary."""
    layout: BlockLayout
    """Which slots predict; a bonus-anchor block's slot 0 does not."""
    embed: Callable[[Tensor], Tensor]
    """The target's (or the draft's own) token embedding, ids [...] -> [..., D]."""


class CorrectionHead(nn.Module, ABC):
    """Base of the correction heads."""

    prefix: ClassVar[str] = "markov_head"
    """Attribute of the drafter that holds the head, and so the prefix of its names in a state dict."""
    drops_last_slot: ClassVar[bool] = False
    """Whether the reference decoder leaves the last slot of an anchor-first block unused (Domino)."""
    uses_prev_embedding: ClassVar[bool] = True
    """Whether :meth:`prev_embedding` exists, which a confidence head `with_markov` reads."""

    def __init__(self, config: HeadConfig, context: HeadContext) -> None:
        super().__init__()
        self.config = config
        self._context = context

    @property
    @abstractmethod
    def out(self) -> nn.Linear:
        """W_out, [V, R] without bias."""

    @abstractmethod
    def latents(self, prev_ids: Tensor, hidden: Tensor) -> Tensor:
        """U of a teacher-forced block.

        Args:
            prev_ids: [..., K] token before the one that each slot predicts. hidden: [..., K, D] from the backbone.

        Returns:
            [..., K, R]; zero where the slot keeps its base logits.
        """

    def start_from(self, embedding: Tensor) -> None:
        """Initialise from the target's embedding [V, D] when a new drafter is attached; nothing by default."""
        return None

    def initial_state(self, hidden: Tensor) -> Any:
        """State before the first drafting slot, for hidden [..., D] of any one slot; None for heads without one."""
        return None

    @abstractmethod
    def step(self, prev_id: Tensor, hidden: Tensor, state: Any, slot: int) -> tuple[Tensor, Any]:
        """U of one slot while decoding.

        Args:
            prev_id: [...] token just drafted (the anchor's for the first drafting slot). hidden: [..., D] of the slot.
            state: from the slot before, or :meth:`initial_state`. slot: index k in the block.

        Returns:
            u [..., R] and the state for the next slot.
        """

    def prev_embedding(self, prev_ids: Tensor) -> Tensor:
        """The head's embedding of the previous token, [...] -> [..., E]: what a confidence head may read."""
        raise NotImplementedError(f"{type(self).__name__} embeds no previous token")

    @contextmanager
    def one_lookup(self, prev_ids: Tensor) -> Iterator[None]:
        """Inside, :meth:`prev_embedding` of this tensor of ids is looked up once: each lookup costs a dense gradient.

        It is looked up at once, so that this gradient, as large as the vocabulary, is made last in the backward pass,
        when the activations of all that follows here are gone.
        """
        lookup = self.prev_embedding
        found: dict[str, Tensor] = {}

        def remembered(ids: Tensor) -> Tensor:
            return found["embedding"] if ids is prev_ids and found else lookup(ids)

        if self.uses_prev_embedding:
            found["embedding"] = lookup(prev_ids)
        self.__dict__["prev_embedding"] = remembered
        try:
            yield
        finally:
            del self.__dict__["prev_embedding"]

    @property
    def prev_embedding_dim(self) -> int:
        """E of :meth:`prev_embedding`."""
        return self.out.in_features

    @property
    def first_slot(self) -> int:
        """First slot of a block that predicts a new token."""
        return first_drafting_slot(self._context.layout)


_HEADS: dict[str, type[CorrectionHead]] = {}


def register_head(name: str) -> Callable[[type[CorrectionHead]], type[CorrectionHead]]:
    """Class decorator: make a head available as ``head.type: name``. A taken name is an error."""

    def register(cls: type[CorrectionHead]) -> type[CorrectionHead]:
        if name == "none" or (name in _HEADS and _HEADS[name].__qualname__ != cls.__qualname__):
            raise ConfigError(f"a correction head named {name!r} exists already: choose another name")
        _HEADS[name] = cls
        return cls

    return register


def head_names() -> tuple[str, ...]:
    """Names that ``head.type`` may take, ``none`` first."""
    return ("none", *sorted(_HEADS))


def head_class(name: str) -> type[CorrectionHead]:
    """The class registered under a name; an unknown one is an error that suggests the nearest."""
    if name not in _HEADS:
        raise ConfigError(
            f"head.type is {name!r}, which is not a registered correction head.{nearest(name, head_names())} "
            f"Known: {', '.join(head_names())}; modelopt_spec.register_head adds your own"
        )
    return _HEADS[name]


def build_head(config: HeadConfig, context: HeadContext) -> CorrectionHead | None:
    """The head that a config asks for; None for ``none`` (plain DFlash)."""
    return None if config.type == "none" else head_class(config.type)(config, context)


def init_out_zero(linear: nn.Linear) -> None:
    """Start W_out at zero, so that an untrained head leaves the base logits as they are."""
    torch.nn.init.zeros_(linear.weight)
