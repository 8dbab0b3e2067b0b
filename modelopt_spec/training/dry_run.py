"""Everything that can end a run badly and can be known before it starts: its data, its disk, its memory.

Nothing is trained, and nothing is written but the prepared rows of sets larger than ``data.memory_mb``, which training
will use; the target is built without weights. Each check is reported, also when an earlier one failed, so that one look
finds all that is wrong.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from modelopt_spec.consoles import stdout_console
from modelopt_spec.errors import CheckpointError, DataError
from modelopt_spec.training.costs import optimizer_bytes
from modelopt_spec.training.machine import available_memory
from modelopt_spec.training.plan import plan
from modelopt_spec.training.recipe import Recipe, load_recipe
from modelopt_spec.training.run_checkpoints import check_free

__all__ = ["Check", "DryRun", "dry_run", "print_checks"]

ASSUMED_ROWS = 100_000
"""Planned where the recipe's data cannot be read and says no ``max_samples``, so that a rank's memory and the disk for
checkpoints are checked all the same. What grows with the rows is then left unchecked."""
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
        gpu: plan for this GPU (a name of :data:`~modelopt_spec.training.machine.GPUS`) and check its memory; None: this
            machine's own, or its CPU and memory where it has none.
        rows: rows that do not exist yet, as in :func:`~modelopt_spec.training.plan.plan`; the data is then not read.
        row_tokens: their mean length.
        quiet: no progress bar while rows are prepared.
        options: ``gpus``, ``efficiency`` and ``report`` of :func:`~modelopt_spec.training.plan.plan`.

    Raises:
        SpecError: a mistake in the recipe. Data that cannot be read is a check that fails, not an error.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    options = {**options, "gpu": gpu}
    checks, known = [], True
    try:
        found = plan(loaded, rows=rows, row_tokens=row_tokens, quiet=quiet, **options)
        checks.append(_data(found))
    except DataError as error:
        known = False
        assumed = loaded.data.max_samples or ASSUMED_ROWS
        found = plan(loaded, rows=assumed, row_tokens=row_tokens, **options)
        note = f" (the plan assumes {assumed:,} rows; memory and disk for their features are not checked)"
        checks.append(Check("data", False, f"{error}{note}"))
    checks.append(_directory(loaded, resume))
    checks += _disks(loaded, found, known)
    checks += _memory(found, known)
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


def _directory(recipe: Recipe, resume: bool) -> Check:
    """Whether a run may write to its output directory; nothing is created."""
    try:
        check_free(recipe.output_dir, resume=resume, export=recipe.export_dir)
    except CheckpointError as error:
        return Check("output_dir", False, str(error))
    return Check("output_dir", True, f"{recipe.output_dir} can be written")


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Most that the checkpoints of a run take at once: those kept, the best one, one being written, and the result."""
    values = recipe.training.arguments()
    if values.get("save_strategy") == "no":
        return 4 * parameters
    kept = int(values.get("save_total_limit") or 2) + 1 + int(bool(values.get("load_best_model_at_end")))
    moments = 0 if values.get("save_only_model") else optimizer_bytes(str(values.get("optim", "adamw_torch_fused")))
    exported = 4 * parameters if recipe.export.engines else 0
    return round(kept * (4 + moments) * parameters + 4 * parameters + exported)


def _disks(recipe: Recipe, found: dict[str, Any], known: bool) -> list[Check]:
    """Room for checkpoints and cached features (where the rows are known), summed where both are on one file system."""
    needs = [(recipe.output_dir, checkpoint_bytes(recipe, found["drafter"]["parameters"]), "checkpoints")]
    if recipe.training.features == "cached":
        if recipe.training.cache_dir is None:
            return [Check("disk", False, "training.features is 'cached': name its directory in training.cache_dir")]
        place = Path(recipe.training.cache_dir)
        there = sum(file.stat().st_size for file in place.glob("shard-*.safetensors"))
        if known:
            needs.append((place, max(0, round(found["cache"]["bytes"]) - there), "cached features"))
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


def _memory(found: dict[str, Any], known: bool) -> list[Check]:
    """Memory of a rank against the planned GPU's, or host memory; and, where the rows are known, kept features."""
    rank, time = found["memory"]["rank"]["total"], found["time"]
    kept = found["memory"]["host"]["features"] if known else 0
    host = available_memory()
    checks = []
    if time["kind"] == "gpu":
        room = _free_gpu_memory() if time["here"] else time["memory_gb"] * 1e9
        checks.append(_fits("gpu_memory", rank, FITS * room, f"of a rank, {time['gpu']}"))
    else:
        kept += rank
    if host is not None and kept:
        checks.append(_fits("host_memory", kept, FITS * host, "in this machine's memory"))
    return checks


def _free_gpu_memory() -> int:
    """Bytes that are free on this machine's first GPU."""
    import torch

    return torch.cuda.mem_get_info()[0]


def _fits(name: str, needed: float, room: float, where: str) -> Check:
    text = f"{needed / 1e9:.2f} GB {where}, {room / 1e9:.2f} GB usable"
    fix = "a smaller batch, fewer num_anchors, gradient_checkpointing, fsdp or shard_target make it smaller"
    return Check(name, needed <= room, text if needed <= room else f"{text}: {fix}")


def print_checks(result: DryRun, console: Console | None = None) -> None:
    """Show each check on a line of its own."""
    out = console or stdout_console()
    for check in result.checks:
        mark = "[green]ok[/]  " if check.ok else "[red]FAIL[/]"
        out.print(f"{mark} {check.name}: ", end="", highlight=False)
        out.print(check.detail, markup=False, highlight=False, soft_wrap=True)
