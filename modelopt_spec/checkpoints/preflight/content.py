"""Facts about the bytes: tensors, their types, the target's identity, the mask token against the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from modelopt_spec.checkpoints.card import embedding_sample
from modelopt_spec.checkpoints.engines.base import Directory
from modelopt_spec.checkpoints.importing import MASK_EMBEDDING, check_shared
from modelopt_spec.checkpoints.layouts import Draft, Layout
from modelopt_spec.checkpoints.packing import read_float
from modelopt_spec.checkpoints.preflight.report import Fact
from modelopt_spec.checkpoints.store import fingerprint_of
from modelopt_spec.config import DrafterConfig
from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets.base import TargetShape, open_target

__all__ = ["content_facts", "embedding_warnings", "mask_fact", "target_fact"]

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def target_fact(trained: DrafterConfig | None, written: DrafterConfig | None, target: nn.Module | None) -> list[Fact]:
    """Whether training, files and the target at hand agree on its width and depth, and the target on the vocabulary."""
    known = [config for config in (trained, written) if config is not None]
    if not known:
        return []
    made_for = [(config.target_hidden_size, config.num_target_layers) for config in known]
    mine, theirs = made_for[0] if trained is not None else None, made_for[-1] if written is not None else None
    values, actual, note = made_for, None, ""
    if target is not None:
        shape = open_target(target).shape
        actual = (shape.hidden_size, shape.num_layers)
        values = [*made_for, actual]
        if known[0].vocab_size not in (None, shape.vocab_size):
            note = f"this draft was made for {known[0].vocab_size} ids, the target has {shape.vocab_size}"
    for part in zip(*values):
        if len({value for value in part if value is not None}) > 1:
            note = "this draft belongs to another target"
    return [Fact("target", "", mine, theirs, actual, "differs" if note else "same", note)]


def embedding_warnings(card: dict[str, Any] | None, target: nn.Module | None) -> list[str]:
    """A warning where the embedding is not that of the target in the card: a finetuned target's, or another one's."""
    trained = (card or {}).get("target", {})
    recorded, found = trained.get("embedding"), embedding_sample(target) if target is not None else None
    if recorded is None or found is None or recorded == found:
        return []
    ours = getattr(getattr(target, "config", None), "name_or_path", "") or type(target).__name__
    return [
        f"trained for {trained.get('name') or trained.get('class') or 'an unnamed target'}, whose embedding is not "
        f"that of {ours}: a finetuned target accepts less, another one almost nothing"
    ]


def content_facts(
    root: Path,
    layout: Layout,
    config: DrafterConfig,
    directory: Directory,
    card: dict[str, Any] | None,
    target: nn.Module | None,
    tokenizer: Any,
) -> tuple[list[Fact], Draft | None]:
    """Types, weights, own modules and mask token; the draft itself if it can be read."""
    facts = mask_fact(config, directory, target, tokenizer)
    dtype, draft = _dtype_fact(directory, card, layout), None
    facts.append(dtype)
    try:
        pairs, _ = layout.match(config, directory.entries)
        tensors = read_float(root, directory.config, pairs.values())
        draft = layout.after_read(Draft(config, {ours: tensors[name] for ours, name in pairs.items()}))
        found = fingerprint_of(draft.tensors)
        expected = (card or {}).get("fingerprint")
        if expected is None:
            facts.append(Fact("weights", "", None, found[:12], None, "unknown", "no fingerprint to compare with"))
        elif not dtype.bad:
            same = expected == found
            note = "" if same else "not the weights that were exported"
            facts.append(Fact("weights", "", expected[:12], found[:12], None, "same" if same else "differs", note))
    except CheckpointError as error:
        facts.append(Fact("weights", "", None, None, None, "differs", str(error)))
    if target is not None:
        try:
            check_shared(root, config, target)
        except CheckpointError as error:
            facts.append(Fact("own modules", "", "the target's", "its own", None, "differs", str(error)))
    return facts, draft


def _dtype_fact(directory: Directory, card: dict[str, Any] | None, layout: Layout) -> Fact:
    """The type in the card, in the config and in the file itself."""
    stored = {
        _NAMES.get(entry.dtype, entry.dtype) for name, entry in directory.entries.items() if layout.own_type(name)
    }
    floats = sorted(stored & set(_NAMES.values()))
    held = floats[0] if len(floats) == 1 else " and ".join(floats)
    said = directory.config.get("dtype", directory.config.get("torch_dtype"))
    older = directory.config.get("torch_dtype", said)
    trained = (card or {}).get("dtype")
    values = {value for value in (trained, said, older, held) if value is not None}
    note = "" if len(values) == 1 else f"config.json says {said} (torch_dtype {older}), the tensors are {held}"
    return Fact("dtype", "", trained, said, held, "same" if len(values) == 1 else "differs", note)


def mask_fact(config: DrafterConfig, directory: Directory, target: nn.Module | None, tokenizer: Any) -> list[Fact]:
    """Whether the mask id has an embedding row of its own that text never uses."""
    mask = config.mask_token_id
    if mask is None:
        return [Fact("mask row", "", None, None, None, "differs", "no mask token id")]
    problems = []
    if MASK_EMBEDDING in directory.files:
        problems.append(
            f"{MASK_EMBEDDING} replaces its embedding in engines that read that file; training used the row"
        )
    shape = open_target(target).shape if target is not None else None
    if shape is not None:
        problems += _against_shape(mask, shape)
    if tokenizer is not None:
        problems += _against_tokenizer(mask, tokenizer)
    if not problems and shape is None and tokenizer is None:
        return []
    return [Fact("mask row", "", mask, None, None, "differs" if problems else "same", "; ".join(problems))]


def _against_shape(mask: int, shape: TargetShape) -> list[str]:
    if mask >= shape.embedding_rows:
        return [f"{mask} has no row in the target's embedding ({shape.embedding_rows} rows)"]
    if mask in shape.special_token_ids:
        return [f"{mask} is the target's pad, bos or eos token"]
    return []


def _against_tokenizer(mask: int, tokenizer: Any) -> list[str]:
    """Ids past the vocabulary and special tokens that neither text nor the chat template holds are safe."""
    if mask >= len(tokenizer):
        return []
    added = tokenizer.added_tokens_decoder.get(mask)
    if added is None or not added.special:
        return [f"{mask} ({tokenizer.convert_ids_to_tokens(mask)!r}) is an ordinary token: text holds it"]
    if added.content in str(getattr(tokenizer, "chat_template", "") or ""):
        return [f"{mask} ({added.content!r}) is written by the chat template"]
    named = {getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "unk", "sep", "cls")}
    return [f"{mask} ({added.content!r}) is a token with another meaning"] if mask in named else []
