"""What a run's directory holds: every JSON file of this package in it, by kind, and where each came from.

Nothing is computed anew: a report shows what train, evaluate, calibrate, profile, simulate, compare and export wrote.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelopt_spec.errors import CheckpointError

__all__ = ["Found", "RunFiles", "collect"]

KINDS = {
    "modelopt_spec.training_report": "training",
    "mtsp.evaluation": "evaluation",
    "mtsp.calibration": "calibration",
    "mtsp.cost_profile": "profile",
    "mtsp.simulation": "simulation",
    "mtsp.scheduler": "scheduler",
    "mtsp.comparison": "comparison",
    "mtsp.recipe_comparison": "recipes",
    "modelopt_spec.drafter_card": "card",
}
"""Kinds of files that a report shows, and the section that shows them."""

LARGEST = 64 * 1024 * 1024
DEPTH = 3


@dataclass(frozen=True)
class Found:
    """One file."""

    path: Path
    section: str
    content: dict[str, Any]
    sha256: str


@dataclass(frozen=True)
class RunFiles:
    """All files of a run that a report shows."""

    directory: Path
    files: tuple[Found, ...]
    unreadable: tuple[tuple[Path, str], ...] = field(default=())
    """JSON files that are damaged, with the reason."""

    def of(self, section: str) -> tuple[Found, ...]:
        """The files of a section, the directory's own first."""
        return tuple(found for found in self.files if found.section == section)


def collect(directory: str | Path, more: Sequence[str | Path] = ()) -> RunFiles:
    """Read a run.

    Args:
        directory: of `mtsp train` (or anything that holds files of :data:`KINDS`), searched three levels deep.
        more: further files, for results that were written elsewhere.

    Raises:
        CheckpointError: no such directory or file, or nothing of this package in it.
    """
    root = Path(directory)
    if not root.is_dir():
        raise CheckpointError(f"{root} is not a directory: name a run's output_dir (it holds report.json)")
    for path in more:
        if not Path(path).is_file():
            raise CheckpointError(f"{path} is not a file: name JSON files written by mtsp")
    inside = [path for path in root.rglob("*.json") if len(path.relative_to(root).parts) <= DEPTH]
    files, unreadable, seen = [], [], set()
    for path in [*sorted(inside, key=lambda p: (len(p.relative_to(root).parts), str(p))), *map(Path, more)]:
        if path.resolve() in seen or path.stat().st_size > LARGEST:
            continue
        seen.add(path.resolve())
        data = path.read_bytes()
        try:
            content = json.loads(data)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            unreadable.append((path, str(error)))
            continue
        section = KINDS.get(str(content.get("kind"))) if isinstance(content, dict) else None
        if section:
            files.append(Found(path, section, content, hashlib.sha256(data).hexdigest()))
    if not files:
        raise CheckpointError(
            f"{root} holds no result of this package: write some there, for example with "
            "mtsp evaluate ... --json RUN_DIR/evaluation.json"
        )
    return RunFiles(root, tuple(files), tuple(unreadable))
