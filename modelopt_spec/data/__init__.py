"""Chat rows -> token rows with a supervision mask; on-policy regeneration; the feature cache."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelopt_spec.data.looping import looping

if TYPE_CHECKING:
    from modelopt_spec.data.cache_format import target_fingerprint
    from modelopt_spec.data.cache_plan import CacheSize, estimate_cache
    from modelopt_spec.data.chat import ChatRenderer, TokenRow, render_prompt, render_row
    from modelopt_spec.data.collate import collate_rows
    from modelopt_spec.data.config import (
        CacheConfig,
        DataConfig,
        RegenerateConfig,
        SamplingConfig,
        ServerConfig,
        SourceConfig,
    )
    from modelopt_spec.data.dataset import (
        TokenData,
        load_datasets,
        load_rows,
        open_prepared,
        prepare,
        template_fingerprint,
        tokenizer_fingerprint,
    )
    from modelopt_spec.data.feature_cache import verify_cache, write_cache
    from modelopt_spec.data.inspection import inspect_rows, marked_row
    from modelopt_spec.data.regeneration import RegenerateReport, regenerate
    from modelopt_spec.data.report import DataReport
    from modelopt_spec.data.sources import read_prompts

_HOMES = {
    "CacheConfig": "modelopt_spec.data.config",
    "CacheSize": "modelopt_spec.data.cache_plan",
    "ChatRenderer": "modelopt_spec.data.chat",
    "DataConfig": "modelopt_spec.data.config",
    "DataReport": "modelopt_spec.data.report",
    "RegenerateConfig": "modelopt_spec.data.config",
    "RegenerateReport": "modelopt_spec.data.regeneration",
    "SamplingConfig": "modelopt_spec.data.config",
    "ServerConfig": "modelopt_spec.data.config",
    "SourceConfig": "modelopt_spec.data.config",
    "TokenData": "modelopt_spec.data.dataset",
    "TokenRow": "modelopt_spec.data.chat",
    "collate_rows": "modelopt_spec.data.collate",
    "estimate_cache": "modelopt_spec.data.cache_plan",
    "inspect_rows": "modelopt_spec.data.inspection",
    "load_datasets": "modelopt_spec.data.dataset",
    "load_rows": "modelopt_spec.data.dataset",
    "marked_row": "modelopt_spec.data.inspection",
    "open_prepared": "modelopt_spec.data.dataset",
    "prepare": "modelopt_spec.data.dataset",
    "read_prompts": "modelopt_spec.data.sources",
    "regenerate": "modelopt_spec.data.regeneration",
    "render_prompt": "modelopt_spec.data.chat",
    "render_row": "modelopt_spec.data.chat",
    "target_fingerprint": "modelopt_spec.data.cache_format",
    "template_fingerprint": "modelopt_spec.data.dataset",
    "tokenizer_fingerprint": "modelopt_spec.data.dataset",
    "verify_cache": "modelopt_spec.data.feature_cache",
    "write_cache": "modelopt_spec.data.feature_cache",
}
"""Modules of the public names; settings are read without torch, so nothing is imported before it is used."""

__all__ = [
    "CacheConfig",
    "CacheSize",
    "ChatRenderer",
    "DataConfig",
    "DataReport",
    "RegenerateConfig",
    "RegenerateReport",
    "SamplingConfig",
    "ServerConfig",
    "SourceConfig",
    "TokenData",
    "TokenRow",
    "collate_rows",
    "estimate_cache",
    "inspect_rows",
    "load_datasets",
    "load_rows",
    "looping",
    "marked_row",
    "open_prepared",
    "prepare",
    "read_prompts",
    "regenerate",
    "render_prompt",
    "render_row",
    "target_fingerprint",
    "template_fingerprint",
    "tokenizer_fingerprint",
    "verify_cache",
    "write_cache",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'modelopt_spec.data' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
