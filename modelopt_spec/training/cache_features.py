"""Write the feature cache of a recipe before it is trained: once, for many runs, on whatever machine has the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelopt_spec.config import MODES
from modelopt_spec.data.cache_format import NAMES, target_fingerprint
from modelopt_spec.data.cache_plan import CacheSize, estimate_cache
from modelopt_spec.data.dataset import load_datasets
from modelopt_spec.data.feature_cache import write_cache
from modelopt_spec.errors import ConfigError
from modelopt_spec.resolve import resolve
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.load import load_target, load_tokenizer
from modelopt_spec.training.recipe import Recipe

__all__ = ["cache_features"]


def cache_features(
    recipe: Recipe,
    out: str | Path,
    *,
    device: str | None = None,
    on_size: Callable[[CacheSize], None] | None = None,
    quiet: bool = True,
) -> dict[str, Any]:
    """Write the features that training with ``training.features=cached training.cache_dir=OUT`` would write first.

    Args:
        recipe: its model, data, taps and ``training.cache`` decide what is written.
        out: directory of the cache; one that was begun is completed.
        device: where the target runs.
        on_size: told the size before anything is written.
        quiet: no progress.

    Returns:
        ``directory``, ``rows``, ``tokens``, ``bytes``, ``shards``, ``dtype``, ``layer_ids``, ``seconds`` and the
        ``overrides`` that make training read it.

    Raises:
        ConfigError: the recipe's features come from a server. DataError: no room, or a cache of something else there.
    """
    if recipe.training.features == "remote":
        raise ConfigError("training.features is 'remote': those features come from a server, there is nothing to cache")
    section, started = recipe.model, time.monotonic()
    common: dict[str, Any] = {"revision": section.revision, "trust_remote_code": section.trust_remote_code}
    data = load_datasets(recipe.data, load_tokenizer(section.name_or_path, **common), quiet=quiet)
    common |= {"dtype": section.dtype, "attn_implementation": section.attn_implementation, "device": device}
    model = load_target(section.name_or_path, **common)
    target = open_target(model)
    values = {key: value for key, value in recipe.drafter_config.items() if key != "mask_token"}
    layer_ids = resolve(MODES[recipe.mode](**values), target.shape).target_layer_ids or ()
    settings = recipe.training.cache
    dtype = NAMES[next(model.parameters()).dtype] if settings.dtype == "auto" else settings.dtype
    size = estimate_cache(data.train, len(layer_ids), target.shape.hidden_size, dtype, settings.positions)
    if on_size is not None:
        on_size(size)
    identity = {**data.identity, "target": target_fingerprint(model), "data": data.train_report.fingerprint}
    index = write_cache(target, data.train, layer_ids, out, identity, settings, quiet=quiet)
    return {
        "kind": "mtsp.feature_cache",
        "version": 1,
        "directory": str(out),
        "rows": index.rows,
        "tokens": size.tokens,
        "bytes": index.bytes,
        "shards": len(index.shards),
        "dtype": index.dtype,
        "layer_ids": list(index.layer_ids),
        "seconds": time.monotonic() - started,
        "overrides": ["training.features=cached", f"training.cache_dir={out}"],
    }
