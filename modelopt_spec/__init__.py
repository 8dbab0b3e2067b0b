"""modelopt-spec: speculative-decoding drafters for Hugging Face and Megatron models, from training to the engine.

    import modelopt_spec as mtsp

    model = mtsp.convert(model, ("dspark", {"mask_token": "auto"}), tokenizer=tokenizer)   # attach a DFlash drafter
    result = mtsp.train("dspark/smollm2_135m")                        # or train one from a recipe
    mtsp.evaluate(model, tokenizer, ["prompts.jsonl"])                # accepted length of real rounds
    mtsp.calibrate(model, tokenizer, ["prompts.jsonl"])               # confidence head and scheduler parameters
    mtsp.generate(model, input_ids, max_new_tokens=128)               # the target's own tokens, faster
    mtsp.export(model, "draft", engines=["vllm", "llama.cpp"])        # a directory that engines load as it is

A drafter is a backbone (`modelopt_spec.drafter`) over features of the frozen target (`modelopt_spec.targets`) with a
correction head (`modelopt_spec.drafter.heads`). Which slot predicts which token stands in `modelopt_spec.conventions`.
Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from modelopt_spec.versions import __version__

if TYPE_CHECKING:
    from modelopt_spec.checkpoints.export import export
    from modelopt_spec.checkpoints.importing import load_drafter
    from modelopt_spec.checkpoints.opening import open_checkpoint
    from modelopt_spec.checkpoints.store import restore, save
    from modelopt_spec.conversion import convert
    from modelopt_spec.decoding.evaluate import evaluate
    from modelopt_spec.decoding.generate import generate
    from modelopt_spec.drafter.heads import CorrectionHead, HeadContext, register_head
    from modelopt_spec.scheduling.api import calibrate
    from modelopt_spec.training.train import train

_HOMES = {
    "CorrectionHead": "modelopt_spec.drafter.heads",
    "HeadContext": "modelopt_spec.drafter.heads",
    "calibrate": "modelopt_spec.scheduling.api",
    "convert": "modelopt_spec.conversion",
    "evaluate": "modelopt_spec.decoding.evaluate",
    "export": "modelopt_spec.checkpoints.export",
    "generate": "modelopt_spec.decoding.generate",
    "load_drafter": "modelopt_spec.checkpoints.importing",
    "open_checkpoint": "modelopt_spec.checkpoints.opening",
    "register_head": "modelopt_spec.drafter.heads",
    "restore": "modelopt_spec.checkpoints.store",
    "save": "modelopt_spec.checkpoints.store",
    "train": "modelopt_spec.training.train",
}

__all__ = [
    "CorrectionHead",
    "HeadContext",
    "__version__",
    "calibrate",
    "convert",
    "evaluate",
    "export",
    "generate",
    "load_drafter",
    "open_checkpoint",
    "register_head",
    "restore",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public function when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'modelopt_spec' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
