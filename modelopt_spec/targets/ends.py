"""The two ends of a target: embedding, final norm and output projection, without the layers between them.

That is all that a drafter needs of its target while the features come from elsewhere, and a few per cent of its memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from modelopt_spec.errors import CheckpointError, UnsupportedError
from modelopt_spec.targets.elsewhere import Elsewhere
from modelopt_spec.targets.hf import text_config
from modelopt_spec.targets.packaged import resolve_target

__all__ = ["final_norm", "load_ends"]


def _decoder(model: Any) -> Any:
    for name, module in model.named_modules():
        if any(part in name for part in ("vision", "visual", "audio")):
            continue
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and isinstance(
            getattr(module, "norm", None), nn.Module
        ):
            return module
    raise UnsupportedError(f"{type(model).__name__}: found no decoder with `layers` and a final `norm`")


def final_norm(model: Any) -> nn.Module:
    """The norm between the last layer and the output projection."""
    norm: nn.Module = _decoder(model).norm
    return norm


def load_ends(
    name: str,
    *,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A target whose layers raise when they are run; only the tensors of its ends are read.

    Args:
        name: directory, hub name or packaged model. dtype: auto, float32, bfloat16 or float16.
        device: where to put it.

    Raises:
        CheckpointError: nothing loadable is there. UnsupportedError: a model class whose decoder is not found.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import logging

    path = str(resolve_target(name))
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # every layer's tensor is "unexpected"
    try:
        config = AutoConfig.from_pretrained(path, **common)
        plain = trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        layers, types = text.num_hidden_layers, getattr(text, "layer_types", None)
        text.num_hidden_layers = 0
        if types is not None:
            text.layer_types = []
        loader = AutoModelForCausalLM if plain else AutoModelForImageTextToText
        chosen = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = loader.from_pretrained(path, config=config, dtype=chosen, **common)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load the ends of the target {name!r}: {error}") from error
    finally:
        logging.set_verbosity(level)
    decoder = _decoder(model)
    decoder.layers = nn.ModuleList(Elsewhere() for _ in range(layers))
    own = text_config(model)
    own.num_hidden_layers = layers
    if types is not None:
        own.layer_types = types
    model.eval()
    return model if device is None else nn.Module.to(model, device)
