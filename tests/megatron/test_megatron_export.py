"""Export from Megatron: the same bytes as from Hugging Face for the same drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from megatron_workers import WorkerPool

pytestmark = pytest.mark.megatron

CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("vanilla", "vllm", 2, {"tp": 2}),
    ("rnn", "sglang", 2, {"pp": 2, "taps": (0, 3, 6)}),
    ("gru", "sglang", 4, {"tp": 2, "pp": 2, "taps": (1, 5)}),
    ("none", "vllm", 4, {"tp": 2}),
]


@pytest.mark.parametrize(("mode", "engine", "world", "layout"), CASES, ids=str)
def test_files_are_byte_equal(
    pool: WorkerPool, tmp_path: Path, mode: str, engine: str, world: int, layout: dict[str, Any]
) -> None:
    results = pool.run("jobs_export:write", world, directory=str(tmp_path), mode=mode, engine=engine, **layout)
    assert sum(r["wrote"] for r in results) == 1
    assert all("not empty" in r["refused"] or "overwrite" in r["refused"] for r in results), results
    ours, theirs = (sorted(p.name for p in (tmp_path / side).iterdir()) for side in ("megatron", "hf"))
    assert ours == theirs
    cards = {}
    for name in ours:
        contents = [(tmp_path / side / name).read_bytes() for side in ("megatron", "hf")]
        if b'"fingerprint"' in contents[0] and name.endswith(".json"):
            cards = {side: json.loads(data) for side, data in zip(("megatron", "hf"), contents, strict=True)}
            for card in cards.values():
                card["target"].pop("class")  # a tiny model's config does not name its class
        else:
            assert contents[0] == contents[1], name
    embeddings = {side: card["target"].pop("embedding") for side, card in cards.items()}
    assert embeddings["megatron"] is None, "no rank needs to hold the whole embedding"
    assert len(embeddings["hf"]) == 16
    assert cards["megatron"] == cards["hf"]
    sides = ("megatron_saved", "hf_saved", "hf_restored")
    assert len({(tmp_path / side / "model.safetensors").read_bytes() for side in sides}) == 1
