"""Write the engines' own scheduler files from a :class:`SchedulerFile`, with the launch lines that use them.

Legend: G draft tokens of a block (gamma).

vLLM reads no file: it profiles itself and takes the raw sigmoid, so the only thing that can be shipped is one shared
temperature T folded into the confidence layer: ``sigmoid((w x + b) / T) = sigmoid((w / T) x + b / T)``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.scheduling.cost import CostTable
from modelopt_spec.scheduling.engine_tables import (
    StsFile,
    additive,
    sglang_one_axis,
    sglang_sts,
    sglang_two_axis,
    tensorrt_llm,
)
from modelopt_spec.scheduling.scheduler_file import SchedulerFile

__all__ = ["EngineFiles", "fold_shared_temperature", "launch_lines", "write_engine_files"]

STS_FILE = "scheduler_sglang_sts.json"
SPS_FILE = "scheduler_sglang_sps.json"
TENSORRT_LLM_FILE = "scheduler_tensorrt_llm_sps.json"


@dataclass(frozen=True)
class EngineFiles:
    """What was written for the engines, and how to start them with it."""

    files: dict[str, Path]
    """Keys ``sglang_sts``, ``sglang_sps``, ``tensorrt_llm_sps``; absent where there is nothing to write."""
    launch: dict[str, str]
    """Launch line of ``sglang``, ``tensorrt_llm`` (YAML of ``speculative_config``) and ``vllm``."""
    notes: tuple[str, ...]


def write_engine_files(
    directory: str | Path,
    scheduler: SchedulerFile,
    *,
    target: str = "TARGET",
    draft: str | None = None,
    context: float | None = None,
) -> EngineFiles:
    """Write SGLang's and TensorRT-LLM's files into ``directory``.

    Args:
        directory: the checkpoint directory, which exists.
        scheduler: calibration, cost table or both.
        target: model name for the launch lines.
        draft: draft directory for the launch lines; default ``directory``.
        context: context length whose step times go into the files (they have no such axis).
    """
    directory = Path(directory)
    if scheduler.calibration is None and scheduler.cost is None:
        raise ConfigError("the scheduler file has neither calibration nor cost table: there is nothing to write")
    known = asdict(scheduler.identity) | {"gamma": scheduler.gamma}
    identity = {key: value for key, value in known.items() if value is not None}
    files: dict[str, Path] = {}
    notes: list[str] = []
    if scheduler.calibration is not None:
        c = scheduler.calibration
        if c.offset:
            raise ConfigError(
                f"the calibration has an offset ({c.offset:g}), which the engines' files cannot say: export the "
                "checkpoint, which puts it into the confidence layer's bias"
            )
        sts = StsFile(c.temperatures, c.dataset, c.num_rounds, c.ece_before, c.ece_after, identity)
        files["sglang_sts"] = _write(directory / STS_FILE, sglang_sts(sts))
    else:
        notes.append("no calibration: the engines use raw confidences, which are usually too high")
    if scheduler.cost is not None:
        two = additive(scheduler.cost, context=context)
        one = scheduler.cost if isinstance(scheduler.cost, CostTable) else None
        if one is not None and one.lookup == "staircase":
            sps = sglang_one_axis(one, identity=identity)
        else:
            sps = sglang_two_axis(two, identity=identity)
        files["sglang_sps"] = _write(directory / SPS_FILE, sps)
        files["tensorrt_llm_sps"] = _write(directory / TENSORRT_LLM_FILE, tensorrt_llm(two, identity=identity))
    else:
        notes.append("no cost table: SGLang and TensorRT-LLM verify whole blocks until one is measured")
    if scheduler.policy.survival_floor == 0.0:
        notes.append("SGLang drops candidates of survival below 1e-6 by itself; TensorRT-LLM and vLLM do not")
    launch = launch_lines(scheduler, files, target=target, draft=draft or str(directory))
    return EngineFiles(files, launch, tuple(notes))


def launch_lines(scheduler: SchedulerFile, files: Mapping[str, Path], *, target: str, draft: str) -> dict[str, str]:
    """How to start each engine with the files of :func:`write_engine_files`."""
    gamma = scheduler.gamma
    sglang = [
        "SGLANG_RAGGED_VERIFY_MODE=compact python -m sglang.launch_server",
        f"--model-path {target}",
        "--speculative-algorithm DSPARK",
        f"--speculative-draft-model-path {draft}",
        f"--speculative-num-draft-tokens {gamma + 1}",
    ]
    if "sglang_sps" in files:
        sglang.append(f"--speculative-dspark-sps-table-path {files['sglang_sps']}")
    if "sglang_sts" in files:
        sglang.append(f"--speculative-dspark-confidence-sts-path {files['sglang_sts']}")
    tiers = sorted({1, (gamma + 1) // 2, gamma})
    trt = [
        "speculative_config:",
        "  decoding_type: DSpark",
        f"  speculative_model: {draft}",
        f"  max_draft_len: {gamma}",
        "  enable_confidence_scheduling: true",
        "  enable_ragged_verify: true",
    ]
    if "sglang_sts" in files:
        trt.append(f"  confidence_sts_path: {files['sglang_sts']}")
    if "tensorrt_llm_sps" in files:
        trt.append(f"  confidence_sps_table_path: {files['tensorrt_llm_sps']}")
    trt.append(f"  confidence_verify_len_tiers: {tiers}")
    vllm = {
        "method": "dspark",
        "model": draft,
        "num_speculative_tokens": gamma,
        "enable_adaptive_verification": True,
    }
    return {
        "sglang": " \\\n  ".join(sglang),
        "tensorrt_llm": "\n".join(trt),
        "vllm": f"vllm serve {target} --speculative-config '{json.dumps(vllm)}'",
    }


def fold_shared_temperature(
    state_dict: Mapping[str, Tensor], temperature: float, offset: float = 0.0
) -> dict[str, Tensor]:
    """Copy of a drafter's state dict whose confidence layer gives ``(logit + offset) / temperature``.

    Every key that ends in ``confidence_head.proj.weight`` or ``.bias`` is changed; the other tensors are shared.
    Serve such a checkpoint without a calibration file, or the confidences are calibrated twice.
    """
    if not temperature > 0 or temperature == float("inf"):
        raise ConfigError(f"temperature is {temperature}: it must be positive and finite")
    ends = ("confidence_head.proj.weight", "confidence_head.proj.bias")
    names = [name for name in state_dict if name.endswith(ends)]
    if not any(name.endswith(ends[0]) for name in names):
        raise CheckpointError("the state dict has no confidence_head.proj.weight: there is no temperature to fold")
    if offset and not any(name.endswith(ends[1]) for name in names):
        raise CheckpointError("the confidence layer has no bias that an offset could go into: calibrate without offset")
    scaled = {
        name: ((state_dict[name].double() + (offset if name.endswith(ends[1]) else 0.0)) / temperature).to(
            state_dict[name].dtype
        )
        for name in names
    }
    return {**state_dict, **scaled}


def _write(path: Path, data: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
