"""Everything that can end a run badly and can be known before it starts: its data, its disk, its memory.

Nothing is trained, and nothing is written but the prepared rows of sets larger than ``data.memory_mb``, which training
will use; the target is built without weights. Each check is reported, also when an earlier one failed, so that one look
finds all that is wrong.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from modelopt_spec.errors import DataError
from modelopt_spec.training.costs import optimizer_bytes
from modelopt_spec.training.plan import plan
from modelopt_spec.training.recipe import Recipe, load_recipe

__all__ = ["Check", "DryRun", "dry_run", "print_checks"]

ASSUMED_ROWS = 100_000
"""Planned where the recipe's data cannot be read, so that memory and disk are checked all the same."""
DISK_MARGIN, FITS = 256 << 20, 0.92


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    """data, output_dir, disk, gpu_memory or host_memory."""
    ok: bool
    detail: str
    """What was found, and where something is wrong, what to do about it."""


@dataclass(frozen=True)
class DryRun:
    """What :func:`dry_run` returns."""

    plan: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The plan's dictionary with ``checks`` and ``ok``."""
        return {**self.plan, "checks": [asdict(check) for check in self.checks], "ok": self.ok}


def dry_run(
    recipe: str | Path | Recipe,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    resume: bool = False,
    gpu: str | None = None,
    rows: int | None = None,
    row_tokens: int | None = None,
    quiet: bool = True,
    **options: Any,
) -> DryRun:
    """Plan a run and check what it needs on this machine.

    Args:
        recipe: built-in name, YAML file, or a loaded :class:`Recipe`.
        overrides: ``key.path=value`` strings.
        resume: the run will go on from checkpoints that stand in its output directory.
        gpu: check the memory of this GPU (a name of :data:`~modelopt_spec.training.plan.GPUS`); None: of this machine's
            own, or host memory where it has none.
        rows: rows that do not exist yet, as in :func:`~modelopt_spec.training.plan.plan`; the data is then not read.
        row_tokens: their mean length.
        quiet: no progress bar while rows are prepared.
        options: ``gpus``, ``efficiency`` and ``report`` of :func:`~modelopt_spec.training.plan.plan`.

    Raises:
        SpecError: a mistake in the recipe. Data that cannot be read is a check that fails, not an error.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    options = {**options, "gpu": gpu or "h100"}
    checks = []
    try:
        found = plan(loaded, rows=rows, row_tokens=row_tokens, quiet=quiet, **options)
        checks.append(_data(found))
    except DataError as error:
        found = plan(loaded, rows=ASSUMED_ROWS, row_tokens=row_tokens, **options)
        checks.append(Check("data", False, f"{error} (the rest assumes {ASSUMED_ROWS:,} rows)"))
    output_dir = Path(loaded.training.arguments().get("output_dir") or "runs/mtsp")
    checks.append(_directory(output_dir, resume))
    checks += _disks(loaded, found, output_dir)
    checks += _memory(found, gpu)
    return DryRun(found, tuple(checks))


def _data(found: dict[str, Any]) -> Check:
    data = found["data"]
    size = f"{data['rows']:,} rows, {data['tokens']:,} tokens, {data['supervised_tokens']:,} supervised"
    if data["assumed"]:
        return Check("data", True, f"not read: {size} assumed")
    return Check(
        "data", data["rows"] > 0, size if data["rows"] else "no row is left: see the counts of `mtsp data inspect`"
    )


# ---- disk ------------------------------------------------------------------------------------------------------------


def _standing(path: Path) -> Path:
    """The nearest directory that exists."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())


def _directory(output_dir: Path, resume: bool) -> Check:
    """Whether a run may write to its output directory; nothing is created."""
    blocked = next((p for p in (output_dir.absolute(), *output_dir.absolute().parents) if p.exists()), None)
    if blocked is not None and not blocked.is_dir():
        return Check("output_dir", False, f"{blocked} is a file: choose another training.output_dir")
    standing = _standing(output_dir)
    if not os.access(standing, os.W_OK | os.X_OK):
        return Check("output_dir", False, f"{standing} cannot be written to: choose another training.output_dir")
    if not resume and ((output_dir / "report.json").exists() or any(output_dir.glob("checkpoint-*"))):
        return Check(
            "output_dir", False, f"{output_dir} holds another run: pass --resume, or set another training.output_dir"
        )
    return Check("output_dir", True, f"{output_dir} can be written")


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Most that the checkpoints of a run take at once: those kept, the best one, one being written, and the result."""
    values = recipe.training.arguments()
    if values.get("save_strategy") == "no":
        return 4 * parameters
    kept = int(values.get("save_total_limit") or 2) + 1 + int(bool(values.get("load_best_model_at_end")))
    moments = 0 if values.get("save_only_model") else optimizer_bytes(str(values.get("optim", "adamw_torch_fused")))
    exported = 4 * parameters if recipe.export.engines else 0
    return round(kept * (4 + moments) * parameters + 4 * parameters + exported)


def _disks(recipe: Recipe, found: dict[str, Any], output_dir: Path) -> list[Check]:
    """Room for checkpoints and cached features, summed where both are on one file system."""
    needs = [(output_dir, checkpoint_bytes(recipe, found["drafter"]["parameters"]), "checkpoints")]
    if recipe.training.features == "cached":
        if recipe.training.cache_dir is None:
            return [Check("disk", False, "training.features is 'cached': name its directory in training.cache_dir")]
        there = sum(file.stat().st_size for file in Path(recipe.training.cache_dir).glob("shard-*.safetensors"))
        needs.append(
            (Path(recipe.training.cache_dir), max(0, round(found["cache"]["bytes"]) - there), "cached features")
        )
    by_device: dict[int, list[tuple[Path, int, str]]] = {}
    for path, size, what in needs:
        by_device.setdefault(_standing(path).stat().st_dev, []).append((_standing(path), size, what))
    checks = []
    for parts in by_device.values():
        free = shutil.disk_usage(parts[0][0]).free
        needed = sum(size for _, size, _ in parts)
        text = " and ".join(f"{size / 1e9:.2f} GB of {what}" for _, size, what in parts)
        text += f", {free / 1e9:.1f} GB free at {parts[0][0]}"
        ok = needed + DISK_MARGIN <= free
        checks.append(Check("disk", ok, text if ok else f"{text}: choose another disk, or fewer checkpoints and taps"))
    return checks


# ---- memory ----------------------------------------------------------------------------------------------------------


def _memory(found: dict[str, Any], gpu: str | None) -> list[Check]:
    """Memory of a rank against the named GPU, this machine's GPU, or host memory; and features that a host keeps."""
    rank, kept = found["memory"]["rank"]["total"], found["memory"]["host"]["features"]
    host = _host_memory()
    checks = []
    if gpu is not None:
        checks.append(_fits("gpu_memory", rank, FITS * found["time"]["memory_gb"] * 1e9, f"of a rank, {gpu}"))
    elif torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
        checks.append(_fits("gpu_memory", rank, FITS * free, f"of a rank, {torch.cuda.get_device_name()}"))
    else:
        kept += rank
    if host is not None and kept:
        checks.append(_fits("host_memory", kept, FITS * host, "in this machine's memory"))
    return checks


def _fits(name: str, needed: float, room: float, where: str) -> Check:
    text = f"{needed / 1e9:.2f} GB {where}, {room / 1e9:.2f} GB usable"
    fix = "a smaller batch, fewer num_anchors, gradient_checkpointing, fsdp or shard_target make it smaller"
    return Check(name, needed <= room, text if needed <= room else f"{text}: {fix}")


def _host_memory() -> int | None:
    """Bytes that are free or can be freed; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines)
    return int(values["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in values else None


def print_checks(result: DryRun, console: Console | None = None) -> None:
    """Show each check on a line of its own."""
    out = console or Console()
    for check in result.checks:
        mark = "[green]ok[/]  " if check.ok else "[red]FAIL[/]"
        out.print(f"{mark} {check.name}: ", end="", highlight=False)
        out.print(check.detail, markup=False, highlight=False, soft_wrap=True)
