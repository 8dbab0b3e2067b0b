"""Open whatever holds a drafter: a checkpoint of this package, a run's directory, or an exported or published draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modelopt_spec.arguments import check_path
from modelopt_spec.checkpoints.card import read_card
from modelopt_spec.checkpoints.importing import load_drafter
from modelopt_spec.checkpoints.store import DESCRIPTION, read_description, restore
from modelopt_spec.config import DrafterConfig
from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets.load import load_target, load_tokenizer

__all__ = ["open_checkpoint", "recorded_target", "shared_modules"]


def recorded_target(checkpoint: str | Path) -> str:
    """Name of the target that a directory says its drafter belongs to; empty if it says nothing."""
    directory = Path(checkpoint)
    if (directory / DESCRIPTION).is_file():
        description = read_description(directory)
        recipe = description.get("recipe") or {}
        return str((recipe.get("model") or {}).get("name_or_path") or description.get("target") or "")
    return str((read_card(directory) or {}).get("target", {}).get("name") or "")


def shared_modules(target: nn.Module | str, config: DrafterConfig) -> dict[str, Tensor]:
    """The target's embedding and output projection, for drafts whose files carry them; {} for the others.

    Args:
        target: the model, or its name; one that has no plain weights gives {}.
        config: the drafter's.
    """
    if config.backbone.layer_style != "gemma4" or not target:
        return {}
    model: Any = load_target(target) if isinstance(target, str) else target
    modules = {"embed_tokens.weight": model.get_input_embeddings(), "lm_head.weight": model.get_output_embeddings()}
    weights = {name: getattr(module, "weight", None) for name, module in modules.items()}
    plain = {
        name: w for name, w in weights.items() if isinstance(w, Tensor) and w.is_floating_point() and not w.is_meta
    }
    return {name: w.detach().cpu() for name, w in plain.items()} if len(plain) == len(modules) else {}


def open_checkpoint(
    checkpoint: str | Path, target: str | None = None, *, dtype: str = "auto", device: Any = None
) -> tuple[nn.Module, Any]:
    """A target with its drafter, and the tokenizer.

    Args:
        checkpoint: of :func:`modelopt_spec.save`, a run (its ``drafter`` directory or itself), or a draft in any
            published layout.
        target: name of the target; default the one that the checkpoint was trained for.
        dtype: of the target; the drafter follows it, so that what is measured is what is served.

    Raises:
        CheckpointError: nothing readable is there, or the target is not known.
    """
    directory = check_path("checkpoint", checkpoint, "the directory of a drafter")
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory: name a checkpoint or an exported draft")
    if not (directory / DESCRIPTION).is_file() and (directory / "drafter" / DESCRIPTION).is_file():
        directory = directory / "drafter"
    name = target or recorded_target(directory)
    if not name:
        raise CheckpointError(f"{directory} does not say which target it belongs to: pass target (--target)")
    model: Any = load_target(name, dtype=dtype, device=device)
    if (directory / DESCRIPTION).is_file():
        restore(model, directory)
    else:
        load_drafter(directory, model, quiet=True)
    model.drafter.to(model.get_input_embeddings().weight.dtype)
    model.drafter.eval()
    return model, load_tokenizer(name)
