"""What one call of generate was asked to do: arguments first, then the given generation config, then the model's own,
then transformers' defaults (transformers' own order).

Whatever a generation config can ask for that would change the distribution in a way that speculative verification here
does not reproduce is refused by name, never ignored.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import GenerationConfig

from modelopt_spec.arguments import whole_number
from modelopt_spec.decoding.sampling import GREEDY, Sampling
from modelopt_spec.errors import ConfigError, UnsupportedError

__all__ = ["FROM_CONFIG", "Settings", "neutral_config", "resolve_settings"]

FROM_CONFIG: Any = object()
"""Default of arguments for which None has a meaning of its own."""

_TRANSFORMERS_TOP_K = 50

_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "bad_words_ids": (None,),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "exponential_decay_length_penalty": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
    "max_time": (None,),
    "use_cache": (None, True),
}
"""Fields of a generation config and the values under which they do nothing."""

_REFUSED_WHEN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_p": (None, 0.0),
    "typical_p": (None, 1.0),
    "top_h": (None,),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
}

_CACHES = (None, "dynamic", "dynamic_full")


def neutral_config(**values: Any) -> GenerationConfig:
    """A generation config that keeps the model's own penalties and limits out, with some values set."""
    harmless = {**_REFUSED, **_REFUSED_WHEN_SAMPLING}
    return GenerationConfig(
        **{name: options[-1] for name, options in harmless.items() if options[-1] is not None} | values
    )


@dataclass(frozen=True)
class Settings:
    """Resolved settings of one generation."""

    max_new_tokens: int
    sampling: Sampling
    eos_token_ids: frozenset[int]
    """Tokens that end an output; empty to go on until the limit."""
    pad_token_id: int
    """Fills the rows of the result behind their ends."""
    pad_marks_padding: bool
    """Whether that token in a prompt can be taken for padding: it was given, and it is no end-of-text token."""
    stop_strings: tuple[str, ...] = ()


def _ids(name: str, value: Any, rows: int | None) -> frozenset[int]:
    """Token ids of an argument: one, several or none.

    Args:
        name: of the argument.
        value: an id, a list or tensor of ids, or None.
        rows: how many ids the target embeds; None does not check, for configs that name ids of no token.
    """
    if value is None:
        return frozenset()
    values = value.tolist() if hasattr(value, "tolist") else value
    listed = values if isinstance(values, list | tuple | set | frozenset) else [values]
    if rows is None:
        return frozenset(int(item) for item in listed)
    return frozenset(whole_number(name, item, 0, rows - 1, ": an id that the target embeds") for item in listed)


def _strings(value: Any) -> tuple[str, ...]:
    """Stop strings as a tuple."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) for text in strings):
        raise ConfigError(f"stop_strings is {value!r}: it must be a text, or a list of them")
    if any(not text for text in strings):
        raise ConfigError("stop_strings holds an empty string, which would stop at once: remove it")
    return tuple(strings)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _sampling(
    config: Any, do_sample: bool | None, temperature: float | None, top_k: int | None, top_p: float | None
) -> Sampling:
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(f"do_sample is {do_sample!r}: it must be true, false or None")
    _checked(_first(temperature, 0.0), _first(top_k, 0), _first(top_p, 1.0))
    if do_sample is None:
        do_sample = temperature > 0 if temperature is not None else bool(getattr(config, "do_sample", None))
    if not do_sample:
        return GREEDY
    return _checked(
        _first(temperature, config.temperature, 1.0),
        _first(top_k, config.top_k, _TRANSFORMERS_TOP_K),
        _first(top_p, config.top_p, 1.0),
    )


def _checked(temperature: Any, top_k: Any, top_p: Any) -> Sampling:
    """A sampling of plain numbers, whose types and ranges :class:`Sampling` checks before they are converted."""
    given = Sampling(temperature, top_k, top_p)
    return Sampling(float(given.temperature), int(given.top_k), float(given.top_p))


def _complete(given: GenerationConfig | None, own: GenerationConfig | None) -> GenerationConfig:
    """The given config with its open fields filled from the model's, as transformers does."""
    config = copy.deepcopy(given) if given is not None else GenerationConfig()
    if own is not None:
        config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
    if config.cache_implementation == "hybrid":
        config.cache_implementation = None
    return config


def _refuse(config: Any, sampling: Sampling) -> None:
    refused = _REFUSED if sampling.greedy else {**_REFUSED, **_REFUSED_WHEN_SAMPLING}
    for name, harmless in refused.items():
        value = getattr(config, name, None)
        if value not in harmless:
            raise UnsupportedError(
                f"generation_config.{name} is {value!r}: speculative generation would not reproduce it. Pass a "
                f"generation_config without it (transformers' model.generate takes it, without a draft)"
            )
    cache = getattr(config, "cache_implementation", None)
    if cache not in _CACHES:
        raise UnsupportedError(
            f"generation_config.cache_implementation is {cache!r}: rejected tokens must be cut out of the target's "
            "cache, which works with the default (dynamic) caches only; leave it unset"
        )


def resolve_settings(
    model: nn.Module,
    prompt_width: int,
    *,
    max_new_tokens: int | None = None,
    generation_config: GenerationConfig | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | Sequence[int] | None = FROM_CONFIG,
    pad_token_id: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    embedded_ids: int | None = None,
) -> Settings:
    """Settings from arguments, ``generation_config`` (default: the model's own) and transformers' defaults.

    With ``embedded_ids``, the number of ids that the target embeds, an ``eos_token_id`` beyond them is refused.

    As in transformers, sampling without a given top_k keeps 50 tokens: pass ``top_k=0`` for the whole vocabulary.

    Raises:
        ConfigError: no limit on the length, or a value out of range. UnsupportedError: see the module's text.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ConfigError(
            f"generation_config is a {type(generation_config).__name__}: it must be a transformers.GenerationConfig"
        )
    config = _complete(generation_config, getattr(model, "generation_config", None))
    sampling = _sampling(config, do_sample, temperature, top_k, top_p)
    _refuse(config, sampling)
    limit = _first(max_new_tokens, config.max_new_tokens)
    if limit is not None:
        whole_number("max_new_tokens", limit, 1)
    if limit is None and config.max_length is not None:
        limit = config.max_length - prompt_width
    if limit is None:
        raise ConfigError("max_new_tokens is not set: say how many tokens may be generated at most")
    if limit < 1:
        raise ConfigError(
            f"generation_config.max_length is {config.max_length} and the prompt has {prompt_width} tokens already: "
            "pass max_new_tokens"
        )
    from_model = _first(config.eos_token_id, getattr(getattr(model, "config", None), "eos_token_id", None))
    asked = eos_token_id is not FROM_CONFIG
    eos = _ids("eos_token_id", eos_token_id if asked else from_model, embedded_ids if asked else None)
    strings = _strings(_first(stop_strings, config.stop_strings) or ())
    given = _first(pad_token_id, config.pad_token_id)
    if pad_token_id is not None:
        whole_number("pad_token_id", pad_token_id, 0)
    pad = int(_first(given, min(eos, default=None), 0))
    return Settings(int(limit), sampling, eos, pad, given is not None and pad not in eos, strings)
