"""Chat rows -> token rows with a supervision mask; on-policy regeneration; the feature cache."""

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
from modelopt_spec.data.looping import looping
from modelopt_spec.data.regenerate import RegenerateReport, regenerate
from modelopt_spec.data.report import DataReport
from modelopt_spec.data.sources import read_prompts

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
