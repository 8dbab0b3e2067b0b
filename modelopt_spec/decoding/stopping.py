"""Where an output ends: end-of-text tokens, stop strings and the length limit, on committed tokens only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StopStringCriteria

from modelopt_spec.decoding.settings import Settings
from modelopt_spec.errors import ConfigError

__all__ = ["StopRules"]


class StopRules:
    """Applies the stopping settings to newly committed tokens."""

    def __init__(self, settings: Settings, tokenizer: Any = None) -> None:
        self._eos = settings.eos_token_ids
        self._limit = settings.max_new_tokens
        self._strings: StopStringCriteria | None = None
        if settings.stop_strings:
            if tokenizer is None:
                raise ConfigError(f"stop_strings {list(settings.stop_strings)} need the tokenizer: pass tokenizer=")
            self._strings = StopStringCriteria(tokenizer, list(settings.stop_strings))

    def room(self, output: Sequence[int]) -> int:
        """Tokens that may still follow an output."""
        return self._limit - len(output)

    def cut(self, prompt: Sequence[int], output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        """How many of the ``new`` tokens stay, and why the output ends there: eos, stop_string, length or None.

        ``prompt`` and ``output`` are the tokens before; a stop string may begin in them, as in transformers.
        """
        room = self.room(output)
        for count, token in enumerate(new[:room], start=1):
            if token in self._eos:
                return count, "eos"
            if self._strings is not None and self._at_stop_string(prompt, output, new[:count]):
                return count, "stop_string"
        return (room, "length") if len(new) >= room else (len(new), None)

    def _at_stop_string(self, prompt: Sequence[int], output: Sequence[int], new: Sequence[int]) -> bool:
        assert self._strings is not None
        longest = self._strings.maximum_token_len
        tokens = [*prompt[-longest:], *output[-longest:], *new][-longest:]
        return bool(self._strings(torch.tensor([tokens]), None)[0])
