"""Job of test_megatron_export.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jobs_train import both_sides

from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.store import restore, save
from modelopt_spec.errors import SpecError
from modelopt_spec.targets.megatron_export import export_drafter, save_drafter


def write(directory: str, mode: str, engine: str, **layout: Any) -> dict[str, Any]:
    """Export and save the same drafter from both sides; rank 0 also from Hugging Face's."""
    model, reference, _ = both_sides("qwen3", mode, layout)
    root = Path(directory)
    report = export_drafter(model, root / "megatron", engines=[engine], quiet=True)
    save_drafter(model, root / "megatron_saved")
    if torch.distributed.get_rank() == 0:
        export(reference, root / "hf", engines=[engine], quiet=True)
        save(reference, root / "hf_saved")
        with torch.no_grad():
            reference.drafter.fc.weight.zero_()
        restore(reference, root / "megatron_saved")
        save(reference, root / "hf_restored")
    torch.distributed.barrier()
    try:
        export_drafter(model, root / "megatron", engines=[engine], quiet=True)
        refused = ""
    except SpecError as error:
        refused = str(error)
    return {"wrote": report is not None, "refused": refused}
