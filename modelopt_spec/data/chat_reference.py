"""The plain version of :mod:`modelopt_spec.data.chat`: one conversation at a time, one token at a time.

It asks transformers for everything: ``apply_chat_template`` renders, its assistant mask is taken as it is where the
template has generation tags, and otherwise a token is supervised when its first character lies behind the prompt of
its turn. It knows nothing of templates that rewrite earlier turns or print more behind the end of a turn.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

__all__ = ["reference_row", "reference_tagged_row"]


def reference_row(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, supervise: str = "all"
) -> tuple[list[int], list[bool]]:
    """Ids and mask by rendering prefixes; a turn ends with the last character that is not white space."""
    render: Any = partial(tokenizer.apply_chat_template, tokenize=False)
    text = render(messages)
    taught = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    spans = []
    for i in taught if supervise == "all" else taught[-1:]:
        prompt = render(messages[:i], add_generation_prompt=True)
        turn = render(messages[: i + 1])
        if not turn.startswith(prompt) or not text.startswith(turn.rstrip()):
            raise ValueError(f"turn {i} is not rendered behind its prompt, or differently later on")
        spans.append((len(prompt), len(turn.rstrip())))
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    mask = [any(start <= first < end for start, end in spans) for first, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def reference_tagged_row(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[bool]]:
    """Ids and mask of a template with generation tags, as transformers gives them."""
    encoded: Any = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    return encoded["input_ids"], [bool(value) for value in encoded["assistant_masks"]]
