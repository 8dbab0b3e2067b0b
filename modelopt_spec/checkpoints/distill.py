"""Another head on the same backbone: the way out for a drafter whose head an engine does not serve.

The backbone keeps its weights, the new head starts from what the old one shares with it (a ``gated`` or ``rnn`` head
has a vanilla head's two tables) and is trained for a short while on the data that the drafter was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from modelopt_spec.checkpoints.store import config_of, read_description
from modelopt_spec.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from modelopt_spec.training.recipe import Recipe
    from modelopt_spec.training.train import TrainResult

__all__ = ["distill", "distill_recipe"]

MARKOV = ("vanilla", "gated", "rnn")


def distill_recipe(
    checkpoint: str | Path,
    output_dir: str | Path,
    *,
    head: str = "vanilla",
    steps: int = 300,
    overrides: Sequence[str] = (),
) -> Recipe:
    """The recipe of such a training: the checkpoint's own one with another head, a frozen backbone and fewer steps.

    Args:
        checkpoint: of a run, which recorded its recipe.
        output_dir: of the new run.
        head: type of the new head, one of the Markov heads.
        steps: optimizer steps.
        overrides: ``key.path=value`` changes on top.

    Raises:
        CheckpointError: the checkpoint does not say which recipe made it.
        ConfigError: a head that is no Markov head, or the one that it has already.
    """
    from modelopt_spec.training.recipe import Recipe

    description = read_description(checkpoint)
    config = config_of(description)
    if head not in MARKOV or config.head.type not in MARKOV:
        raise ConfigError(f"cannot distill head {config.head.type!r} into {head!r}: known are {', '.join(MARKOV)}")
    if head == config.head.type:
        raise ConfigError(f"{checkpoint} has a {head!r} head already")
    recorded = description.get("recipe")
    if not isinstance(recorded, dict):
        raise CheckpointError(
            f"{checkpoint} does not record the recipe that made it: write one with drafter.init_from and "
            "drafter.freeze: backbone, and train it"
        )
    drafter: dict[str, Any] = config.replace(head=config.head.replace(type=head)).model_dump()
    del drafter["algorithm"]
    values: dict[str, Any] = {
        **recorded,
        "metadata": {"name": f"distill/{head}", "description": f"a {head} head on the backbone of {checkpoint}"},
        "drafter": {**drafter, "mode": "dspark", "init_from": str(checkpoint), "freeze": ["backbone"]},
        "export": {},
    }
    values["training"] = {
        **recorded.get("training", {}),
        "output_dir": str(output_dir),
        "max_steps": steps,
        "warmup_steps": min(20, steps // 10),
        "save_steps": steps,
    }
    changed = OmegaConf.merge(OmegaConf.create(values), OmegaConf.from_dotlist(list(overrides)))
    plain = OmegaConf.to_container(changed, resolve=True)
    assert isinstance(plain, dict)
    return Recipe(**{str(key): value for key, value in plain.items()})


def distill(
    checkpoint: str | Path,
    output_dir: str | Path,
    *,
    head: str = "vanilla",
    steps: int = 300,
    overrides: Sequence[str] = (),
    quiet: bool = False,
) -> TrainResult:
    """Train another head on a checkpoint's frozen backbone; arguments as of :func:`distill_recipe`.

    Returns:
        As of :func:`modelopt_spec.train`; its ``checkpoint`` exports to the engines that serve the new head.
    """
    from modelopt_spec.training.train import train

    recipe = distill_recipe(checkpoint, output_dir, head=head, steps=steps, overrides=overrides)
    return train(recipe, resume=False, quiet=quiet)
