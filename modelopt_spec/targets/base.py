"""What a target must offer: features, embeddings and logits. Hugging Face, Megatron and cached targets implement it.

Legend: B batch, S sequence, D hidden, V vocabulary, T taps, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from modelopt_spec.errors import UnsupportedError
from modelopt_spec.records import TargetFeatures

__all__ = ["Target", "TargetShape", "open_target", "register_target"]


@dataclass(frozen=True)
class TargetShape:
    """Sizes and settings of a target that a drafter takes over where its config leaves them open."""

    model_type: str
    """For example ``llama``; the text part's where the model has several parts."""
    hidden_size: int
    """D."""
    vocab_size: int
    """V: rows of the output projection, and so width of the logits."""
    num_layers: int
    """L."""
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any] = field(default_factory=dict)
    """As in transformers 5, without the parts that a text-only full-head rotation has no use for."""
    max_position_embeddings: int = 0
    embedding_rows: int = 0
    """Rows of the input embedding (may exceed the tokenizer's vocabulary)."""
    embedding_scale: float = 1.0
    """Factor that the model applies after its embedding module (1 where the module applies it itself)."""
    logit_softcapping: float | None = None
    logit_scale: float = 1.0
    """Factor on the logits before any soft-capping."""
    tied_embeddings: bool = False
    special_token_ids: tuple[int, ...] = ()
    """pad, bos and eos: never a mask token."""
    num_streams: int = 1
    """Residual streams of a hyper-connected target."""
    parts: dict[str, Any] = field(default_factory=dict)
    """The target's own experts, hyper-connections and latent attention, as sections of a backbone's config."""


@runtime_checkable
class Target(Protocol):
    """The interface through which everything else sees a target. Nothing here gives gradients of its weights."""

    @property
    def shape(self) -> TargetShape:
        """Sizes and settings."""
        ...

    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Run the target on [B, S] ids and keep the tapped layers' outputs and the last hidden state, nothing else."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings as the first layer sees them, [...] -> [..., D]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's own output projection, scaling and soft-capping included, [..., D] -> [..., V]."""
        ...

    def output_weight(self) -> Tensor | None:
        """[V, D] when ``logits(h)`` is exactly ``h @ W.T``; None where the module must be called."""
        ...


_FACTORIES: list[tuple[Callable[[nn.Module], bool], Callable[[nn.Module], Target]]] = []


def register_target(accepts: Callable[[nn.Module], bool], factory: Callable[[nn.Module], Target]) -> None:
    """Teach :func:`open_target` another kind of model. Later registrations are asked first."""
    _FACTORIES.insert(0, (accepts, factory))


def open_target(model: nn.Module) -> Target:
    """The :class:`Target` of a model: Hugging Face causal models, Megatron-Core GPT models, registered ones."""
    if isinstance(model, list | tuple):
        raise UnsupportedError(
            f"got {len(model)} model chunks: virtual pipeline parallelism is not supported, convert one GPTModel"
        )
    from modelopt_spec.targets import hf, megatron_hook

    for accepts, factory in [*_FACTORIES, *megatron_hook.FACTORIES, (hf.accepts, hf.HFTarget)]:
        if accepts(model):
            return factory(model)
    raise UnsupportedError(
        f"{type(model).__name__} is not a model that can be a target: pass a Hugging Face causal language model "
        "(with get_input_embeddings and get_output_embeddings) or a megatron-core GPTModel"
    )


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a projection is an ordinary float matrix that may be read directly instead of called."""
    weight = getattr(module, "weight", None)
    return (
        type(module) is nn.Linear
        and module.bias is None
        and type(weight) in (nn.Parameter, Tensor)
        and weight.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        and not weight.is_meta
        and not (module._forward_hooks or module._forward_pre_hooks)
    )
