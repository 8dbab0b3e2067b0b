"""The drafter: a block-parallel backbone, a correction head and a confidence head on top of a frozen target.

Legend: B batch, S context positions, N blocks, K slots, D hidden, R head rank, V vocabulary, T taps.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import num_draft_tokens
from modelopt_spec.drafter.attention_plan import BlockAttentionPlan, plan_blocks
from modelopt_spec.drafter.confidence import ConfidenceHead
from modelopt_spec.drafter.heads import CorrectionHead, HeadContext, build_head
from modelopt_spec.errors import ConfigError
from modelopt_spec.mask_token import resolve_mask_token
from modelopt_spec.records import BlockBatch, BlockOutput, TargetFeatures
from modelopt_spec.targets.base import Target

__all__ = ["Drafter", "build_drafter"]


class Drafter(nn.Module, ABC):
    """Base of the backbones. `model.drafter` after :func:`modelopt_spec.convert`.

    The target's embedding and output projection are used through :meth:`bind`; they are neither submodules of the
    drafter nor part of its state dict.
    """

    gradient_checkpointing: bool = False
    """Keep each layer's input only while training, and compute the layer again in the backward pass."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self._target: Target | None = None

    def add_heads(self, *, confidence_bias: bool = True) -> None:
        """Build the correction head, the confidence head and what a reduced vocabulary needs."""
        config, width = self.config, self.config.backbone.hidden_size or 0
        vocab = config.vocab_size or 0
        context = HeadContext(
            hidden_size=width,
            vocab_size=vocab,
            draft_vocab_size=config.draft_vocab_size or vocab,
            layout=config.layout,
            embed=self.embed,
        )
        head = build_head(config.head, context)
        self._head_name = head.prefix if head is not None else None
        if head is not None:
            setattr(self, head.prefix, head)
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence.enabled:
            if head is not None and config.confidence.with_markov and not head.uses_prev_embedding:
                raise ConfigError(
                    f"confidence.with_markov is true, but the head {config.head.type!r} embeds no previous token: set "
                    "confidence.with_markov to false"
                )
            embedding_dim = head.prev_embedding_dim if head is not None and config.confidence.with_markov else 0
            self.confidence_head = ConfidenceHead(width, embedding_dim, bias=confidence_bias)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    # ---- the target ------------------------------------------------------------------------------------------------

    def bind(self, target: Target) -> None:
        """Use a target's embedding and output projection from now on."""
        self._target = target

    @property
    def target(self) -> Target:
        """The bound target."""
        if self._target is None:
            raise ConfigError("this drafter is not attached to a target yet: call drafter.bind(target) or mtsp.restore")
        return self._target

    @property
    def head(self) -> CorrectionHead | None:
        """The correction head, None for plain DFlash."""
        return getattr(self, self._head_name) if self._head_name else None

    @property
    def dtype(self) -> torch.dtype:
        """Type of the drafter's weights."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the drafter's weights are."""
        return next(self.parameters()).device

    @property
    def mask_token_id(self) -> int:
        """Id that fills the slots that are not drafted yet."""
        if self.config.mask_token_id is None:
            raise ConfigError(
                "mask_token_id is not set and the target was converted without a tokenizer: give it, or pass "
                "tokenizer= to convert with mask_token: auto (never pad or eos)"
            )
        return self.config.mask_token_id

    def set_mask_token(self, tokenizer: Any) -> None:
        """Resolve the mask token with the target's tokenizer, unless its id is set already."""
        if self.config.mask_token_id is None:
            token, token_id = resolve_mask_token(self.config.mask_token, None, self.target.shape, tokenizer)
            self.config = self.config.replace(mask_token=token, mask_token_id=token_id)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that one block drafts, as the algorithm's reference decodes it."""
        drops = self.head is not None and self.head.drops_last_slot
        return num_draft_tokens(self.config.layout, self.config.block_size, drops_last_slot=drops)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings in the drafter's dtype, [...] -> [..., D]."""
        return self.target.embed(ids).to(self.dtype)

    def logits(self, hidden: Tensor, latents: Tensor | None) -> Tensor:
        """lm_head(h) + W_out u: [..., D], [..., R] -> [..., V]. The plain form; training uses the fused loss."""
        base = self.base_logits(hidden)
        return base if latents is None or self.head is None else base + self.head.out(latents)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """lm_head(h) alone, [..., D] -> [..., V], with the draft's own projection if it has a reduced vocabulary."""
        return self.lm_head(hidden) if self.config.draft_vocab_size is not None else self.target.logits(hidden)

    # ---- the backbone ----------------------------------------------------------------------------------------------

    @abstractmethod
    def context(self, taps: Tensor) -> Tensor:
        """Context features of the tapped layers, [B, S, T*D] -> what :meth:`encode` and the cache take."""

    @abstractmethod
    def encode(self, context: Tensor, blocks: BlockBatch, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Teacher-forced blocks -> hidden [B, N, K, D] for the logits, and the hidden that the confidence head reads.

        ``position_ids`` [B, S] are the rotary positions of the context; None counts from 0.
        """

    def plan_attention(self, blocks: BlockBatch, length: int) -> BlockAttentionPlan:
        """Who sees whom among these blocks and a context of ``length`` positions."""
        backbone = self.config.backbone
        return plan_blocks(
            blocks.anchors,
            blocks.keep,
            blocks.context_start,
            block_size=blocks.input_ids.shape[-1],
            seq_len=length,
            causal=backbone.causal,
            window=backbone.sliding_window,
            window_rule=backbone.window_rule,
        )

    def run_layer(self, layer: nn.Module, *inputs: Any) -> Any:
        """One layer of the training pass, its activations kept or not."""
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
        return layer(*inputs)

    def no_decay_names(self) -> frozenset[str]:
        """Parameters that weight decay must not touch: what modules list under ``no_weight_decay``."""
        return frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.named_modules()
            for name in getattr(module, "no_weight_decay", ())
        )

    @abstractmethod
    def new_cache(self, batch_size: int) -> Any:
        """An empty cache of projected context for B rows."""

    @abstractmethod
    def extend(self, cache: Any, taps: Tensor, counts: Tensor | None = None) -> None:
        """Append context features [B, n, T*D] of newly committed positions; row b takes its first counts[b]."""

    @abstractmethod
    def decode(self, cache: Any, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One block a row, [B, K] ids at positions ``length_b ..`` -> hidden and confidence hidden, [B, K, D]."""

    def forward(self, features: TargetFeatures, blocks: BlockBatch, position_ids: Tensor | None = None) -> BlockOutput:
        """The training pass over teacher-forced blocks."""
        with contextlib.nullcontext() if self.head is None else self.head.one_lookup(blocks.prev_ids):
            hidden, confidence_hidden = self.encode(self.context(features.taps), blocks, position_ids)
            latents = None if self.head is None else self.head.latents(blocks.prev_ids, hidden)
            return BlockOutput(hidden, latents, self.confidence(confidence_hidden, blocks.prev_ids))

    def confidence(self, confidence_hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        """Confidence logits [...] of slots with hidden [..., D] after tokens [...]; None without a confidence head."""
        if self.confidence_head is None:
            return None
        head = self.head if self.config.confidence.with_markov else None
        return self.confidence_head(confidence_hidden, None if head is None else head.prev_embedding(prev_ids))


def build_drafter(config: DrafterConfig) -> Drafter:
    """The drafter of a fully resolved config."""
    from modelopt_spec.drafter import backbones

    return backbones.BACKBONES[config.backbone.type](config)
