"""A DeepSeek-V4 draft in its target's checkpoint: nothing of the target changes, one index covers both."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import modelopt_spec as mtsp
from modelopt_spec import cli
from modelopt_spec.checkpoints.beside_target import export_beside_target
from modelopt_spec.checkpoints.importing import load_drafter
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.checkpoints.safe_read import tensor_entries
from modelopt_spec.errors import CheckpointError, UnsupportedError
from tests.moe.v4 import SIZES, v4_drafter, v4_target


def _target(directory: Path, **tensors: torch.Tensor) -> Path:
    directory.mkdir()
    save_file({"embed.weight": torch.ones(97, 32), **tensors}, directory / "model.safetensors")
    keys = {**SIZES, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "rope_theta": 10000.0}
    keys |= {"num_hidden_layers": 4, "compress_ratios": [0, 4, 0, 128], "rms_norm_eps": 1e-6}
    (directory / "config.json").write_text(json.dumps(keys))
    return directory


def _model(**backbone: Any) -> Any:
    model = v4_target()
    v4_drafter(model, backbone={"num_layers": 2, **backbone})
    return model


def _digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


@pytest.mark.parametrize("experts", ["float", "mxfp4"])
def test_target_stays_as_it_is_and_the_draft_is_found(tmp_path: Path, experts: Any) -> None:
    target, model = _target(tmp_path / "target"), _model()
    before = _digests(target)
    report = export_beside_target(model, target, tmp_path / "out", experts=experts, quiet=True, max_shard_bytes=30_000)
    assert _digests(target) == before and len(report.shards) > 1
    entries = tensor_entries(tmp_path / "out")
    assert "embed.weight" in entries and "mtp.1.hc_head_fn" in entries
    keys = json.loads((tmp_path / "out" / "config.json").read_text())
    assert keys["compress_ratios"] == [0, 4, 0, 128, 0, 0] and keys["dspark_block_size"] == 4
    other = load_drafter(tmp_path / "out", v4_target(), quiet=True)
    if experts == "float":
        for name, tensor in model.drafter.state_dict().items():
            assert torch.equal(other.drafter.state_dict()[name], tensor), name


def test_the_card_names_the_engines_that_load_it(tmp_path: Path) -> None:
    """vLLM and SGLang with the window counted from the block; llama.cpp with its own rule and MXFP4 experts."""
    target = _target(tmp_path / "target")
    report = export_beside_target(_model(), target, tmp_path / "block", quiet=True)
    assert report.engines == ("vllm", "sglang") and set(report.refused) == {"tensorrt_llm", "llama.cpp"}
    assert str(tmp_path / "block") in report.launch["vllm"] and "DSPARK" in report.launch["sglang"]
    assert check(tmp_path / "block", v4_target()).ok
    keys = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**keys, "index_head_dim": 128}))
    for experts, loads in (("float", False), ("mxfp4", True)):
        model = _model(window_rule="query")
        report = export_beside_target(model, target, tmp_path / experts, experts=experts, quiet=True)  # type: ignore[arg-type]
        assert ("llama.cpp" in report.engines) == loads, report.refused
        assert "rule 'block'" in report.refused["vllm"]
        assert check(tmp_path / experts, v4_target(), engines=["llama.cpp"]).ok == loads
    assert "--spec-type draft-dspark" in report.launch["llama.cpp"]


def test_an_older_draft_is_left_out(tmp_path: Path) -> None:
    target = _target(tmp_path / "target", **{"mtp.0.e_proj.weight": torch.zeros(2, 2)})
    report = export_beside_target(_model(), target, tmp_path / "out", quiet=True)
    assert report.rewritten == ("model.safetensors",)
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"embed.weight"}
    assert "mtp.0.e_proj.weight" in load_file(target / "model.safetensors")


def test_another_shape_and_the_targets_own_directory_are_refused(tmp_path: Path) -> None:
    target = _target(tmp_path / "target")
    with pytest.raises(CheckpointError, match="own directory"):
        export_beside_target(_model(), target, target, overwrite=True, quiet=True)
    keys = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**keys, "hc_eps": 1e-3}))
    with pytest.raises(CheckpointError, match="hc_eps"):
        export_beside_target(_model(), target, tmp_path / "out", quiet=True)
    assert not (tmp_path / "out").exists()


def test_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = _target(tmp_path / "target")
    mtsp.save(_model(), tmp_path / "run")
    arguments = ["export-beside", str(tmp_path / "run"), str(target), str(tmp_path / "out"), "--json", "-"]
    result = CliRunner().invoke(cli.application(), [*arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output[result.output.index("{") :])
    assert report["engines"] == ["vllm", "sglang"] and report["linked"] == ["model.safetensors"]
    assert report["worst_difference"] < 1e-4 and (tmp_path / "out" / "model-mtp-00001-of-00001.safetensors").is_file()
    with pytest.raises(UnsupportedError, match="must be float or mxfp4"):
        export_beside_target(_model(), target, tmp_path / "other", experts="int4", quiet=True)  # type: ignore[arg-type]
