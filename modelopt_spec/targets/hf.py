"""Hugging Face causal language models as targets, plain or wrapped (vision-language: the text part is the target).

Legend: B batch, S sequence, D hidden, V vocabulary, T taps, L layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.conventions import EMBEDDING_TAP
from modelopt_spec.errors import UnsupportedError
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.base import TargetShape, is_plain_linear
from modelopt_spec.targets.elsewhere import passing
from modelopt_spec.targets.hf_parts import own_parts

__all__ = ["HFTarget", "accepts"]

STREAM_MODELS = frozenset({"deepseek_v4"})
"""Model types whose layers return [B, S, n, D] streams with the mean over n as their tap (DSpark's convention)."""


def accepts(model: Any) -> bool:
    """Whether a module is a Hugging Face model with embeddings and an output projection."""
    if not (hasattr(model, "config") and hasattr(model, "get_input_embeddings")):
        return False
    return model.get_input_embeddings() is not None and model.get_output_embeddings() is not None


def find_decoder(model: Any) -> Any:
    """The stack of decoder layers: the module that owns both `layers` and `norm`, wherever a wrapper put it."""
    candidates = [model.get_decoder()] if hasattr(model, "get_decoder") else []
    candidates += [
        module
        for name, module in model.named_modules()
        if not any(part in name for part in ("drafter", "vision", "visual", "audio"))
    ]
    for module in candidates:
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) and isinstance(getattr(module, "norm", None), nn.Module):
            return module
    raise UnsupportedError(
        f"{type(model).__name__}: found no decoder with `layers` and a final `norm`, so nothing can be tapped"
    )


def text_config(model: Any) -> Any:
    """The config of the text part."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def rope_parameters(config: Any, head_dim: int) -> dict[str, Any]:
    """Rotary settings for a draft that rotates whole heads with one base: full-attention entry, no partial rotation."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        parameters = parameters.get("full_attention") or next(v for v in parameters.values() if isinstance(v, dict))
    drop = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "type")
    kept = {key: value for key, value in parameters.items() if key not in drop}
    kept.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
    kept.setdefault("rope_type", "default")
    return kept


def read_shape(model: Any) -> TargetShape:
    """Collect a :class:`TargetShape` from the text config and the modules themselves."""
    config = text_config(model)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    width = getattr(config, "intermediate_size", None) or getattr(config, "moe_intermediate_size", None)
    special: set[int] = set()
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(config, key, None)
        special.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    softcap = getattr(config, "final_logit_softcapping", None)
    scaling = getattr(config, "logits_scaling", None)
    return TargetShape(
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=getattr(output, "out_features", None) or config.vocab_size,
        num_layers=len(find_decoder(model).layers),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=width or 4 * config.hidden_size,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=rope_parameters(config, head_dim),
        max_position_embeddings=getattr(config, "max_position_embeddings", 0) or 0,
        embedding_rows=getattr(embedding, "num_embeddings", None) or config.vocab_size,
        embedding_scale=float(getattr(config, "embedding_multiplier", 1.0) or 1.0),
        logit_softcapping=float(softcap) if softcap else None,
        logit_scale=1.0 / scaling if scaling else float(getattr(config, "logit_scale", 1.0) or 1.0),
        tied_embeddings=getattr(output, "weight", None) is getattr(embedding, "weight", object()),
        special_token_ids=tuple(sorted(special)),
        num_streams=int(getattr(config, "hc_mult", 1) or 1),
        parts=own_parts(config),
    )


class HFTarget:
    """A Hugging Face model behind the :class:`~modelopt_spec.targets.base.Target` interface."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decoder = find_decoder(model)
        self._shape = read_shape(model)

    @property
    def shape(self) -> TargetShape:
        """Sizes and settings."""
        return self._shape

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        return self.model.get_input_embeddings().weight.device

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D], as the first layer sees them."""
        embedding = self.model.get_input_embeddings()(ids)
        return embedding if self._shape.embedding_scale == 1.0 else embedding * self._shape.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] through the model's own output projection, scaling and soft-capping.

        A drafter with master weights of a wider type than the target's gives hidden states of that type.
        """
        output = self.model.get_output_embeddings()
        weight = getattr(output, "weight", None)
        if isinstance(weight, Tensor) and weight.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            hidden = hidden.to(weight.dtype)
        logits = output(hidden)
        if self._shape.logit_scale != 1.0:
            logits = logits * self._shape.logit_scale
        cap = self._shape.logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def output_weight(self) -> Tensor | None:
        """[V, D] when the logits are a plain product with it."""
        output = self.model.get_output_embeddings()
        plain = is_plain_linear(output) and self._shape.logit_scale == 1.0 and self._shape.logit_softcapping is None
        return output.weight.detach() if plain else None

    def embedding_matrix(self) -> Tensor | None:
        """The whole input embedding [V, D]; None where it is not a plain float matrix in memory."""
        weight = getattr(self.model.get_input_embeddings(), "weight", None)
        if not isinstance(weight, Tensor) or type(weight) not in (nn.Parameter, Tensor):
            return None
        return weight.detach() if weight.is_floating_point() and not weight.is_meta else None

    @contextlib.contextmanager
    def tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the tapped layers' outputs, each [B, S, D], of every forward run inside the context."""
        taps: dict[int, Tensor] = {}
        handles = []
        for layer_id in layer_ids:
            if layer_id == EMBEDDING_TAP:

                def keep_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
                    taps[EMBEDDING_TAP] = self._collapse(args[0] if args else kwargs["hidden_states"])

                handles.append(self.decoder.layers[0].register_forward_pre_hook(keep_input, with_kwargs=True))
            else:

                def keep_output(module: nn.Module, args: tuple, output: Any, layer_id: int = layer_id) -> None:
                    taps[layer_id] = self._collapse(output[0] if isinstance(output, tuple) else output)

                handles.append(self.decoder.layers[layer_id].register_forward_hook(keep_output))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    def _collapse(self, hidden: Tensor) -> Tensor:
        """[B, S, D] as it is; known hyper-connected streams [B, S, n, D] to their mean; anything else is refused."""
        streams, width = self._shape.num_streams, self._shape.hidden_size
        if hidden.ndim == 3 and hidden.shape[-1] == width:
            return hidden
        if self._shape.model_type in STREAM_MODELS and hidden.ndim == 4 and hidden.shape[2:] == (streams, width):
            return hidden.mean(dim=2)
        raise UnsupportedError(
            f"a layer of {self._shape.model_type!r} returns shape {tuple(hidden.shape)}: this stream layout "
            f"is not understood (known hyper-connected models: {', '.join(sorted(STREAM_MODELS))})"
        )

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Taps [B, S, T*D] and last hidden [B, S, D] of [B, S] ids; no logits, no cache, no gradient buffers."""
        with self.tapped(layer_ids) as taps:
            output = self.decoder(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
            )
        return TargetFeatures(taps=self.join(taps, layer_ids), last_hidden=output.last_hidden_state)

    @staticmethod
    def join(taps: dict[int, Tensor], layer_ids: Sequence[int]) -> Tensor:
        """Concatenate collected taps in order of layer id: [B, S, T*D]."""
        return torch.cat([taps[i] for i in layer_ids], dim=-1)

    @torch.no_grad()
    def verify(self) -> None:
        """Prove on four tokens that this class reads the model as the model reads itself.

        Raises:
            UnsupportedError: the embeddings or logits differ (an unknown scale, cap or projection).
        """
        weight = self.model.get_input_embeddings().weight
        if weight.is_meta:
            return
        ids = (torch.arange(4, device=weight.device) % self._shape.vocab_size).unsqueeze(0)
        training = self.model.training
        self.model.eval()
        try:
            with passing(self.decoder):
                with self.tapped([EMBEDDING_TAP]) as taps:
                    expected = self.model(input_ids=ids, use_cache=False).logits
                got = self.logits(self.decoder(input_ids=ids, use_cache=False).last_hidden_state)
        finally:
            self.model.train(training)
        embedded = self.embed(ids)
        checks = {"input embeddings": (embedded, taps[EMBEDDING_TAP]), "logits": (got, expected)}
        for name, (ours, theirs) in checks.items():
            tolerance = 0.02 if ours.dtype in (torch.bfloat16, torch.float16) else 1e-3
            error = (ours.float() - theirs.float()).abs().max()
            if not error <= tolerance * theirs.float().abs().max().clamp(min=1e-3):
                raise UnsupportedError(
                    f"{type(self.model).__name__}: its {name} differ from what its modules give (max difference "
                    f"{error:.3g}): it applies a scale or a transformation that this version does not know"
                )
