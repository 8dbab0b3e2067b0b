"""Settings of the data room: where rows come from, how they become token rows and how the set is cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from modelopt_spec.config import SpecConfig
from modelopt_spec.errors import ConfigError

__all__ = ["CacheConfig", "DataConfig", "RegenerateConfig", "SamplingConfig", "ServerConfig", "SourceConfig"]


class SourceConfig(SpecConfig):
    """One place that rows are read from."""

    path: str = Field(
        description="a .jsonl/.jsonl.gz/.json/.parquet file, a directory, a glob, a `datasets` name, or data "
        "that comes with this package: builtin://demo/train.jsonl"
    )
    name: str | None = Field(default=None, description="configuration name of a `datasets` set")
    split: str = Field(default="train", description="split of a `datasets` set")
    max_samples: int | None = Field(
        default=None, ge=1, description="rows to keep of this source, chosen after the shuffle"
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="column names to read as others, e.g. {messages: dialog}; keys are the names this room knows",
    )


def _sources(value: Any) -> Any:
    """One path, one section or several of either, as sections; anything else is left for the field's own check."""
    if isinstance(value, str | Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    return tuple({"path": item} if isinstance(item, str) else item for item in value)


class DataConfig(SpecConfig):
    """The recipe's `data` section."""

    train: tuple[SourceConfig, ...] = Field(default=(), description="sources, as paths or as source sections")
    validation: tuple[SourceConfig, ...] = Field(
        default=(), description="sources of held-out rows; their prompts are removed from the training rows"
    )
    validation_share: float = Field(
        default=0.0, ge=0, lt=1, description="share of prompts held out of `train` when `validation` is empty"
    )
    exclude_prompts: tuple[str, ...] = Field(
        default=(), description="prompt files (e.g. benchmarks) whose prompts are never trained on"
    )
    max_length: int = Field(default=2048, ge=8, description="tokens of a row")
    overlong: Literal["truncate", "skip"] = Field(default="truncate", description="what happens to longer rows")
    min_supervised: int = Field(
        default=2, ge=1, description="rows with fewer supervised tokens are skipped (an anchor needs two)"
    )
    supervise: Literal["all", "last"] = Field(default="all", description="assistant turns that are taught")
    rewrites: Literal["split", "last", "refuse"] = Field(
        default="split",
        description="conversations whose template rewrites earlier turns (e.g. strips thinking): one row for each turn "
        "as it was generated, the last turn only, or no row",
    )
    system_role: Literal["keep", "merge", "drop"] = Field(
        default="keep", description="system messages: as they are, in front of the first user message, or removed"
    )
    chat_template: str | None = Field(default=None, description="Jinja text or a file; null = the tokenizer's own")
    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="variables of the template, e.g. {enable_thinking: false}"
    )
    date: str | None = Field(
        default=None, description="YYYY-MM-DD that templates print as today; null = the day of the run"
    )
    skip_looping: bool = Field(default=False, description="leave out rows whose answers loop; their share is reported")
    deduplicate: bool = Field(default=True, description="drop exact copies of a conversation")
    shuffle: bool = Field(default=True, description="order rows by a seeded hash over all sources before any cut")
    max_samples: int | None = Field(default=None, ge=1, description="conversations to keep, over all sources")
    pack: bool = Field(default=False, description="put several short conversations into one row")
    max_bad_share: float = Field(default=0.05, ge=0, le=1, description="the run stops when more rows are unusable")
    seed: int = Field(default=0, ge=0)
    num_workers: int = Field(default=0, ge=0, description="processes that render and tokenize; 0 = this one")
    memory_mb: int = Field(default=512, ge=1, description="raw text held in memory at once; larger sets go over disk")
    cache_dir: str | None = Field(default=None, description="where prepared rows are kept; null = user cache directory")

    @model_validator(mode="before")
    @classmethod
    def _accept_paths(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            for key in ("train", "validation"):
                if data.get(key) is not None:
                    data[key] = _sources(data[key])
            if isinstance(data.get("exclude_prompts"), str):
                data["exclude_prompts"] = (data["exclude_prompts"],)
        return data

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.validation and self.validation_share:
            raise ConfigError(
                f"data.validation_share is {self.validation_share} and data.validation is given: set only one of them"
            )
        if self.min_supervised >= self.max_length:
            raise ConfigError(
                f"data.min_supervised {self.min_supervised} must be less than data.max_length {self.max_length}"
            )
        if self.date is not None:
            parse_date(self.date)
        return self


def parse_date(text: str) -> Any:
    """The day a template sees as today; raises ConfigError for anything but YYYY-MM-DD."""
    from datetime import datetime

    try:
        return datetime.strptime(text, "%Y-%m-%d")
    except ValueError:
        raise ConfigError(f"data.date is {text!r}: write it as YYYY-MM-DD") from None


class SamplingConfig(SpecConfig):
    """How the target speaks; recorded with the rows."""

    temperature: float = Field(default=0.7, ge=0, description="0 = greedy")
    top_p: float = Field(default=0.95, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=1, description="null = not limited (sent to servers only if set)")
    max_tokens: int = Field(default=1024, ge=1, description="of one answer; longer ones end with finish_reason length")

    def request(self) -> dict[str, Any]:
        """Fields of a chat completion request."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return values if self.top_k is None else {**values, "top_k": self.top_k}

    def generate_arguments(self) -> dict[str, Any]:
        """Arguments of transformers' ``generate``."""
        if not self.temperature:
            return {
                "do_sample": False,
                "temperature": None,
                "top_p": None,
                "top_k": None,
                "max_new_tokens": self.max_tokens,
            }
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or 0,
            "max_new_tokens": self.max_tokens,
        }


class ServerConfig(SpecConfig):
    """An OpenAI-compatible server: vLLM, SGLang, llama.cpp, or a hosted one."""

    base_url: str = Field(description="address up to and including /v1")
    model: str = Field(default="default", description="name that the server knows the target by")
    api_key_env: str = Field(default="OPENAI_API_KEY", description="environment variable that holds the key, if any")
    concurrency: int = Field(default=32, ge=1, le=4096, description="dialogues in flight")
    timeout: float = Field(default=600.0, gt=0, description="seconds for one answer")
    retries: int = Field(default=8, ge=0, description="for one answer, with exponentially growing pauses")
    backoff: float = Field(default=0.5, ge=0, description="seconds before the first retry")
    max_backoff: float = Field(default=60.0, gt=0)
    extra_body: dict[str, Any] = Field(default_factory=dict, description="other request fields of this server")


class RegenerateConfig(SpecConfig):
    """Prompts in, answers of the target out."""

    prompts: tuple[SourceConfig, ...] = Field(description="sources; answers in them are replaced")
    output: str = Field(description="the .jsonl file that rows are appended to")
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    server: ServerConfig | None = Field(default=None, description="null = in this process")
    turns: Literal["all", "last"] = Field(
        default="all", description="rewrite every answer in turn, or keep the history and rewrite the last one"
    )
    samples_per_prompt: int = Field(default=1, ge=1)
    thinking_share: float | None = Field(
        default=None, ge=0, le=1, description="share of rows with enable_thinking on, the others off; null = not set"
    )
    exclude_prompts: tuple[str, ...] = Field(default=(), description="prompt files (benchmarks) to leave out")
    max_samples: int | None = Field(default=None, ge=1, description="prompts to answer, chosen after the shuffle")
    max_failed_share: float = Field(default=0.05, ge=0, le=1, description="the run stops when more prompts fail")
    batch_size: int = Field(default=8, ge=1, description="dialogues of a batch in this process")
    memory_mb: int = Field(default=512, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _accept_paths(cls, data: Any) -> Any:
        if isinstance(data, dict):
            data = dict(data)
            if data.get("prompts") is not None:
                data["prompts"] = _sources(data["prompts"])
            if isinstance(data.get("exclude_prompts"), str):
                data["exclude_prompts"] = (data["exclude_prompts"],)
        return data


class CacheConfig(SpecConfig):
    """How target features are kept on disk."""

    dtype: Literal["auto", "float32", "bf16", "fp8"] = Field(
        default="auto",
        description="auto: the target's own; fp8: taps as float8_e4m3 with one scale for each position and tap, the "
        "last hidden states in bf16",
    )
    positions: Literal["needed", "all"] = Field(
        default="needed",
        description="needed: taps up to the last supervised token and last hidden states before supervised tokens; the "
        "rest reads as zeros, which no block looks at",
    )
    shard_mb: int = Field(default=1024, ge=1, description="size of a shard; two are in memory while writing")
    batch_tokens: int = Field(default=16384, ge=1, description="padded tokens of a batch that the target runs on")
    max_gb: float | None = Field(default=None, gt=0, description="refuse to write more than this")
