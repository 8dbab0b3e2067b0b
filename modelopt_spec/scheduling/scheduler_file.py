"""``scheduler.json``: the scheduler parameters that travel with a checkpoint.

Schema, version 1 (every key present, null where unknown)::

    {"kind": "mtsp.scheduler", "version": 1,
     "gamma": int,                                draft tokens of a full block
     "identity": {"model", "model_fingerprint", "drafter_fingerprint", "tokenizer", "tokenizer_fingerprint",
                  "hardware", "engine", "engine_version", "dtype"},
     "sampling_temperature": float,               at which the rounds were collected
     "calibration": {"temperatures": [G], "shared_temperature": float, "prior": [G] mean calibrated confidences,
                     "ece_before": [G], "ece_after": [G], "num_rounds": int, "dataset": str,
                     "offset": float added to each logit before its temperature divides it} | null,
     "cost": a cost table (see cost.py) | null,
     "policy": {"method", "allocation", "delay", "survival_floor", "max_batch_tokens", "padded"},
     "fingerprint": sha256 of all of the above}

On load the fingerprint is recomputed (an edited file is refused), and each identity field that both sides know must
agree. Temperatures belong to a drafter: another model, drafter, tokenizer or gamma is always an error. Step times
belong to a machine: another hardware, engine or dtype is an error unless the caller takes the temperatures alone.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from modelopt_spec.errors import CheckpointError, ConfigError, nearest
from modelopt_spec.scheduling.calibration import check_temperatures
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable, cost_from_dict
from modelopt_spec.scheduling.engine_tables import canonical_sha256
from modelopt_spec.scheduling.policies import PrefixScheduler
from modelopt_spec.text_files import read_text

__all__ = [
    "SCHEDULER_FILE",
    "CalibrationSection",
    "Identity",
    "PolicySection",
    "SchedulerFile",
    "current_hardware",
    "load_scheduler",
    "save_scheduler",
]

T = TypeVar("T")

SCHEDULER_FILE = "scheduler.json"
_KIND = "mtsp.scheduler"
_VERSION = 1
_MODEL_FIELDS = ("model", "model_fingerprint", "drafter_fingerprint", "tokenizer", "tokenizer_fingerprint")
_MACHINE_FIELDS = ("hardware", "engine", "engine_version", "dtype")


@dataclass(frozen=True)
class Identity:
    """What the numbers were measured on; None where unknown."""

    model: str | None = None
    model_fingerprint: str | None = None
    drafter_fingerprint: str | None = None
    tokenizer: str | None = None
    tokenizer_fingerprint: str | None = None
    hardware: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    dtype: str | None = None

    def differences(self, other: Identity, names: tuple[str, ...]) -> list[str]:
        """Fields known on both sides that differ, as text."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return [f"{name}: file {a!r}, here {b!r}" for name, a, b in pairs if None not in (a, b) and a != b]


@dataclass(frozen=True)
class CalibrationSection:
    """Temperatures and what they did on held-out rounds."""

    temperatures: tuple[float, ...]
    shared_temperature: float
    prior: tuple[float, ...]
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    num_rounds: int = 0
    dataset: str = ""
    offset: float = 0.0
    """Added to every logit before its temperature divides it."""


@dataclass(frozen=True)
class PolicySection:
    """Settings of :class:`modelopt_spec.scheduling.policies.PrefixScheduler`."""

    method: str = "global_stale"
    allocation: str = "current"
    delay: int = 2
    survival_floor: float = 0.0
    max_batch_tokens: int | None = None
    padded: bool = False


@dataclass(frozen=True)
class SchedulerFile:
    """The parsed file."""

    gamma: int
    identity: Identity = field(default_factory=Identity)
    sampling_temperature: float = 0.0
    calibration: CalibrationSection | None = None
    cost: CostTable | AdditiveCostTable | CostProfile | None = None
    policy: PolicySection = field(default_factory=PolicySection)

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise ConfigError(f"gamma is {self.gamma}: a block has at least one draft token")
        if not (np.isfinite(self.sampling_temperature) and self.sampling_temperature >= 0):
            raise ConfigError(f"sampling_temperature is {self.sampling_temperature}: it is 0 (greedy) or positive")
        if self.calibration is not None:
            check_temperatures(self.calibration.temperatures, self.gamma)
            check_temperatures([self.calibration.shared_temperature], 1)
            if not np.isfinite(self.calibration.offset):
                raise ConfigError(f"offset is {self.calibration.offset}: it must be finite")
            if len(self.calibration.prior) != self.gamma:
                raise ConfigError(f"prior has {len(self.calibration.prior)} entries, gamma is {self.gamma}")
            if not np.isfinite(self.calibration.prior).all():
                raise ConfigError(f"prior {list(self.calibration.prior)} holds a value that is not finite")

    def to_dict(self) -> dict[str, Any]:
        """JSON form with its fingerprint."""
        body: dict[str, Any] = {
            "kind": _KIND,
            "version": _VERSION,
            "gamma": self.gamma,
            "identity": asdict(self.identity),
            "sampling_temperature": self.sampling_temperature,
            "calibration": None if self.calibration is None else _plain(asdict(self.calibration)),
            "cost": None if self.cost is None else self.cost.to_dict(),
            "policy": asdict(self.policy),
        }
        return body | {"fingerprint": canonical_sha256(body)}

    def scheduler(self, *, use_prior: bool = False) -> PrefixScheduler:
        """The scheduler of this file; ConfigError without a cost table.

        ``use_prior`` counts requests without confidence with the calibrated mean confidences instead of in full.
        """
        if self.cost is None:
            raise ConfigError(
                "scheduler.json has no cost table: without one everything is verified. Profile this machine"
            )
        calibration = self.calibration
        return PrefixScheduler(
            self.cost,
            self.gamma,
            temperatures=None if calibration is None else calibration.temperatures,
            offset=0.0 if calibration is None else calibration.offset,
            prior=calibration.prior if use_prior and calibration is not None else None,
            **asdict(self.policy),
        )


def save_scheduler(path: str | Path, file: SchedulerFile) -> Path:
    """Write ``scheduler.json`` (into a directory, or to the given file name)."""
    path = Path(path)
    target = path / SCHEDULER_FILE if path.is_dir() else path
    target.write_text(json.dumps(file.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return target


def load_scheduler(
    path: str | Path,
    *,
    gamma: int | None = None,
    here: Identity | None = None,
    other_machine: str = "error",
) -> SchedulerFile:
    """Read and check ``scheduler.json``.

    Args:
        path: the file, or the checkpoint directory that holds it.
        gamma: draft tokens of the drafter that will use it; another number is an error.
        here: identity of the running model and machine; fields known on both sides must agree.
        other_machine: for a file of another hardware, engine or dtype ``"error"``, or ``"drop_cost"`` to keep the
            temperatures and drop the cost table.

    Raises:
        CheckpointError: missing, damaged, edited, of another model, or of another machine.
        ConfigError: values that are out of range.
    """
    path = Path(path)
    target = path / SCHEDULER_FILE if path.is_dir() else path
    data = _read(target)
    file = SchedulerFile(
        gamma=int(data["gamma"]),
        identity=_section(Identity, data["identity"], target),
        sampling_temperature=float(data["sampling_temperature"]),
        calibration=_optional(CalibrationSection, data["calibration"], target),
        cost=None if data["cost"] is None else cost_from_dict(data["cost"]),
        policy=_section(PolicySection, data["policy"], target),
    )
    if gamma is not None and gamma != file.gamma:
        raise CheckpointError(
            f"{target} is for gamma {file.gamma}, this drafter drafts {gamma} tokens: calibrate and profile again"
        )
    if here is None:
        return file
    wrong = file.identity.differences(here, _MODEL_FIELDS)
    if wrong:
        raise CheckpointError(f"{target} belongs to another model ({'; '.join(wrong)}): calibrate this drafter")
    moved = file.identity.differences(here, _MACHINE_FIELDS)
    if moved and file.cost is not None:
        if other_machine != "drop_cost":
            raise CheckpointError(
                f"{target}: its step times were measured elsewhere ({'; '.join(moved)}). Profile on this machine, or "
                "load with other_machine='drop_cost' to keep the temperatures alone"
            )
        return SchedulerFile(file.gamma, file.identity, file.sampling_temperature, file.calibration, None, file.policy)
    return file


def current_hardware() -> str:
    """Name of the accelerator, or of the processor and its cores."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} x{torch.cuda.device_count()}"
    return f"cpu {_processor()} x{torch.get_num_threads()} threads"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(target: Path) -> dict[str, Any]:
    if not target.is_file():
        raise CheckpointError(f"{target} does not exist: calibrate or profile the checkpoint to write it")
    try:
        data = json.loads(read_text(target, "a scheduler file (JSON)", CheckpointError))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{target} is not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise CheckpointError(f"{target} is no scheduler file: its kind must be {_KIND!r}")
    if data.get("version") != _VERSION:
        raise CheckpointError(f"{target} has version {data.get('version')!r}, this program reads {_VERSION}")
    missing = {
        "gamma",
        "identity",
        "sampling_temperature",
        "calibration",
        "cost",
        "policy",
        "fingerprint",
    } - data.keys()
    if missing:
        raise CheckpointError(f"{target} lacks {sorted(missing)}: write it again")
    body = {key: value for key, value in data.items() if key != "fingerprint"}
    if canonical_sha256(body) != data["fingerprint"]:
        raise CheckpointError(f"{target}: the fingerprint does not match its content, so it was edited or damaged")
    return data


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in data.items()}


def _section(kind: type[T], data: Mapping[str, Any], target: Path) -> T:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise CheckpointError(f"{target}: unknown key {key!r} in {kind.__name__}.{nearest(key, known)}")
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in data.items()})
    except TypeError as error:
        raise CheckpointError(f"{target}: {kind.__name__} is incomplete ({error})") from error


def _optional(kind: type[T], data: Mapping[str, Any] | None, target: Path) -> T | None:
    return None if data is None else _section(kind, data, target)
