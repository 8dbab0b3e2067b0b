"""Each engine with its DeepSeek-V4 and Gemma-4 drafts: the rules of Qwen3-style layers where a draft has those."""

from __future__ import annotations

from typing import Any

from modelopt_spec.checkpoints.engines import deepseek_v4, gemma4
from modelopt_spec.checkpoints.engines.base import Directory, Engine, Serving, View
from modelopt_spec.checkpoints.engines.llama_cpp import LlamaCpp
from modelopt_spec.checkpoints.engines.sglang import SGLang
from modelopt_spec.checkpoints.engines.tensorrt_llm import TensorRTLLM
from modelopt_spec.checkpoints.engines.vllm import VLLM
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig

__all__ = ["ENGINE_CLASSES"]


class _WithStages(Engine):
    """Put before an engine's class: answers for DeepSeek-V4 drafts and leaves the rest to it."""

    def refuses(self, serving: Serving) -> str | None:
        """By the draft's backbone."""
        if serving.config.backbone.type == "moe_mhc":
            return deepseek_v4.refuses(self.name, serving)
        if serving.config.backbone.layer_style == "gemma4":
            return gemma4.refuses(self.name, serving)
        return super().refuses(serving)  # type: ignore[safe-super]

    def notes(self, serving: Serving) -> list[str]:
        """By the draft's backbone."""
        if serving.config.backbone.type == "moe_mhc":
            return deepseek_v4.notes(self.name, serving)
        if serving.config.backbone.layer_style == "gemma4":
            return gemma4.notes(serving) + super().notes(serving)
        return super().notes(serving)

    def launch(self, config: DrafterConfig, layout: str, target: str, draft: str, *rest: Any, **others: Any) -> str:
        """By the layout."""
        if layout == deepseek_v4.LAYOUT:
            return deepseek_v4.launch(self.name, config, target, draft)
        return super().launch(config, layout, target, draft, *rest, **others)  # type: ignore[safe-super]

    def reads(self, directory: Directory, target: TargetFacts) -> View:
        """By the tensors that are there."""
        if deepseek_v4.holds_draft(directory):
            return deepseek_v4.reads(self.name, directory)
        if gemma4.holds_draft(directory):
            return gemma4.reads(self.name, directory)
        return super().reads(directory, target)  # type: ignore[safe-super]


class _VLLM(_WithStages, VLLM):
    layouts = (*VLLM.layouts, deepseek_v4.LAYOUT, gemma4.LAYOUT)  # type: ignore[assignment]


class _SGLang(_WithStages, SGLang):
    layouts = (*SGLang.layouts, deepseek_v4.LAYOUT)  # type: ignore[assignment]


class _LlamaCpp(_WithStages, LlamaCpp):
    layouts = (*LlamaCpp.layouts, deepseek_v4.LAYOUT)  # type: ignore[assignment]


class _TensorRTLLM(_WithStages, TensorRTLLM):
    """It has no such draft, and says so."""


ENGINE_CLASSES: tuple[type[Engine], ...] = (_VLLM, _SGLang, _TensorRTLLM, _LlamaCpp)
"""All engines, in the order of the support table."""
