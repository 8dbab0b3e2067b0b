"""Scheduler parameters that travel with an exported draft: checked, folded where asked for, and put into launch lines.

``scheduler.json`` names the drafter that it was calibrated for by a fingerprint of its weights in the dtype of the
calibration. An exported draft may be stored in another dtype, so the fingerprint is taken of its weights cast to that
one.

*Folding* (for vLLM, which reads no file): the confidence layer is divided by the shared temperature s. The files that
other engines read then hold T_k / s, because sigmoid(z / T_k) = sigmoid((z / s) / (T_k / s)), so one directory still
serves all of them. An *offset* of the calibration is always folded: no engine's file can say it, and the confidence
layer's bias can.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.scheduling.export import fold_shared_temperature, write_engine_files
from modelopt_spec.scheduling.scheduler_file import (
    SCHEDULER_FILE,
    Identity,
    SchedulerFile,
    load_scheduler,
    save_scheduler,
)

__all__ = ["Shipment", "ship", "shippable"]


@dataclass(frozen=True)
class Shipment:
    """What :func:`ship` wrote."""

    files: tuple[str, ...]
    """Names inside the directory, ``scheduler.json`` first."""
    launch: dict[str, str]
    """The launch lines given, with the scheduler's switches."""
    notes: tuple[str, ...]


def shippable(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], *, gamma: int, fold: bool = False
) -> tuple[SchedulerFile, Mapping[str, Tensor]]:
    """Read a scheduler file for a draft about to be exported.

    Args:
        path: ``scheduler.json`` or the directory that holds it.
        tensors: the draft's weights under the names of the drafter's state dict.
        gamma: draft tokens of its block.
        fold: divide the confidence layer by the shared temperature.

    Returns:
        The file and the tensors, both folded where asked for or where the calibration has an offset.

    Raises:
        CheckpointError: another gamma, or another drafter's file. ConfigError: nothing to fold.
    """
    file = load_scheduler(Path(path), gamma=gamma)
    known, found = file.identity.drafter_fingerprint, _fingerprints(tensors, file.identity)
    if known is not None and known not in found:
        raise CheckpointError(
            f"{path} belongs to another drafter (fingerprint {known[:12]}, this one has {found[0][:12]}): calibrate "
            "and profile the checkpoint that you export"
        )
    if file.calibration is None:
        if fold:
            raise ConfigError(f"{path} has no calibration, so there is no shared temperature to fold: calibrate first")
        return file, tensors
    offset = file.calibration.offset
    if not fold and not offset:
        return file, tensors
    shared = file.calibration.shared_temperature if fold else 1.0
    calibration = replace(
        file.calibration,
        temperatures=tuple(value / shared for value in file.calibration.temperatures),
        shared_temperature=file.calibration.shared_temperature / shared,
        offset=0.0,
    )
    return replace(file, calibration=calibration), fold_shared_temperature(tensors, shared, offset)


def ship(
    file: SchedulerFile,
    tensors: Mapping[str, Tensor],
    directory: Path,
    *,
    launch: Mapping[str, str],
    target: str,
    out: str,
    folded: bool = False,
) -> Shipment:
    """Write ``scheduler.json`` and the engines' files beside an exported draft.

    Args:
        file: of :func:`shippable`.
        tensors: the weights that are written.
        directory: where the draft is being written.
        launch: launch line of each engine that loads the draft.
        target: the target's name, for the launch lines.
        out: where the directory will stand at last, for the launch lines.
        folded: whether the shared temperature was folded.
    """
    identity = replace(file.identity, drafter_fingerprint=_fingerprints(tensors, file.identity)[-1])
    file = replace(file, identity=identity)
    save_scheduler(directory / SCHEDULER_FILE, file)
    written = write_engine_files(directory, file, target=target, draft=out)
    names = {key: path.name for key, path in written.files.items()}
    lines = {engine: _scheduled(engine, line, file, names, out) for engine, line in launch.items()}
    notes = list(written.notes)
    if folded:
        notes.append("the shared temperature is folded into the confidence layer: vLLM's raw sigmoid is calibrated")
    elif file.calibration is not None and "vllm" in launch:
        notes.append(
            f"vLLM reads no calibration: fold the shared temperature ({file.calibration.shared_temperature:.3g}) into "
            "the confidence layer (--fold-temperature) to serve it calibrated there"
        )
    return Shipment((SCHEDULER_FILE, *sorted(names.values())), lines, tuple(notes))


def _fingerprints(tensors: Mapping[str, Tensor], identity: Identity) -> list[str]:
    """Of the weights as they are and, last, in the dtype that the identity names."""
    from modelopt_spec.checkpoints.store import fingerprint_of

    found = [fingerprint_of(tensors)]
    dtype = getattr(torch, identity.dtype or "", None)
    if isinstance(dtype, torch.dtype):
        found.append(fingerprint_of({n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}))
    return found


def _scheduled(engine: str, line: str, file: SchedulerFile, names: Mapping[str, str], out: str) -> str:
    """A launch line with the scheduler switched on; lines of engines and methods without one stay as they are."""
    switch = {
        "sglang": "--speculative-algorithm DSPARK",
        "tensorrt_llm": "decoding_type: DSpark",
        "vllm": '"method": "dspark"',
    }
    if engine not in switch or switch[engine] not in line:
        return line
    sts, sps = (f"{out}/{names[key]}" if key in names else None for key in ("sglang_sts", "sglang_sps"))
    if engine == "sglang":
        line = f"SGLANG_RAGGED_VERIFY_MODE=compact {line}"
        line += f" --speculative-dspark-sps-table-path {sps}" if sps else ""
        return line + (f" --speculative-dspark-confidence-sts-path {sts}" if sts else "")
    if engine == "tensorrt_llm":
        extra = ["enable_confidence_scheduling: true", "enable_ragged_verify: true"]
        extra += [f"confidence_sts_path: {sts}"] if sts else []
        if "tensorrt_llm_sps" in names:
            extra.append(f"confidence_sps_table_path: {out}/{names['tensorrt_llm_sps']}")
        extra.append(f"confidence_verify_len_tiers: {sorted({1, (file.gamma + 1) // 2, file.gamma})}")
        return f"{line.removesuffix('}')}, {', '.join(extra)}}}"
    end = "}'"
    return f'{line.removesuffix(end)}, "enable_adaptive_verification": true{end}'
