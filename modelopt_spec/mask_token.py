"""Which token fills the slots that are not drafted yet: given, the tokenizer's own mask token, or picked on request.

Never pad or eos in silence: an id that the target sees in real text teaches the drafter two meanings for it.
"""

from __future__ import annotations

from typing import Any

from modelopt_spec.errors import ConfigError
from modelopt_spec.targets.base import TargetShape

__all__ = ["pick_unused_id", "resolve_mask_token"]


def resolve_mask_token(
    mask_token: str | None, mask_token_id: int | None, shape: TargetShape, tokenizer: Any = None
) -> tuple[str | None, int | None]:
    """The mask token and its id, in this order: ``mask_token_id``, ``mask_token``, the tokenizer's mask token.

    Returns:
        (token or None, id), or (None, None) when nothing is asked for and there is no tokenizer that could tell.

    Raises:
        ConfigError: the id has no embedding row, is pad, bos or eos, nothing names a mask token, or it is named by its
            text and there is no tokenizer.
    """
    if mask_token_id is not None:
        _check_id(mask_token_id, shape)
        return mask_token, mask_token_id
    if tokenizer is None:
        if mask_token is not None:
            raise ConfigError(
                f"mask_token is {mask_token!r}, which only the tokenizer can turn into an id: pass the target's "
                "tokenizer (convert(..., tokenizer=tokenizer)), or set mask_token_id"
            )
        return None, None
    if mask_token == "auto":
        mask_token_id = pick_unused_id(tokenizer, shape)
        return tokenizer.convert_ids_to_tokens(mask_token_id) or mask_token, mask_token_id
    if mask_token is not None:
        mask_token_id = tokenizer.convert_tokens_to_ids(mask_token)
        if mask_token_id is None or mask_token not in tokenizer.get_vocab():
            raise ConfigError(
                f"mask_token {mask_token!r} is not in the tokenizer's vocabulary: use another, or mask_token: auto"
            )
    else:
        mask_token_id = getattr(tokenizer, "mask_token_id", None)
        if mask_token_id is None:
            raise ConfigError(
                "the tokenizer has no mask token: set mask_token: auto (an id that the tokenizer never produces), "
                "mask_token: '<token>' or mask_token_id"
            )
        mask_token = tokenizer.mask_token
    _check_id(mask_token_id, shape)
    return mask_token, mask_token_id


def _check_id(mask_token_id: int, shape: TargetShape) -> None:
    if mask_token_id >= shape.embedding_rows:
        raise ConfigError(
            f"mask_token_id {mask_token_id} has no row in the target's embedding ({shape.embedding_rows} rows): "
            "choose a smaller id, or mask_token: auto"
        )
    if mask_token_id in shape.special_token_ids:
        raise ConfigError(
            f"mask_token_id {mask_token_id} is the target's pad, bos or eos token {list(shape.special_token_ids)}, "
            "which real text holds: choose another id, or mask_token: auto"
        )


def pick_unused_id(tokenizer: Any, shape: TargetShape) -> int:
    """An id with an embedding row that encoding text never gives.

    First choice: the lowest id past the tokenizer's vocabulary. Else the last special token that is neither one of the
    tokenizer's named special tokens nor written by its chat template.

    Raises:
        ConfigError: there is none.
    """
    if len(tokenizer) < shape.embedding_rows:
        return len(tokenizer)
    named = set(tokenizer.all_special_ids) | set(shape.special_token_ids)
    main = {getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "unk", "sep", "cls")}
    template = str(getattr(tokenizer, "chat_template", "") or "")
    free = [
        token_id
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.special
        and token_id < shape.embedding_rows
        and token_id not in main
        and token_id not in shape.special_token_ids
        and token.content not in template
    ]
    unnamed = [token_id for token_id in free if token_id not in named]
    if not (unnamed or free):
        raise ConfigError(
            "mask_token: auto found no id that the tokenizer never produces: every embedding row is an ordinary token. "
            "Add a token to the tokenizer and a row to the embedding, or give mask_token_id"
        )
    return max(unnamed or free)
