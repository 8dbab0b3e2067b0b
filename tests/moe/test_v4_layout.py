"""DeepSeek-V4 drafts on disk: names, keys, round trips, quantised imports, and the plain reading of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelopt_spec.checkpoints.block_scales import (
    dequantize_fp8,
    dequantize_mxfp4,
    power_of_two,
    quantize_fp8,
    quantize_mxfp4,
)
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter, read_draft
from modelopt_spec.checkpoints.layouts import LAYOUTS
from modelopt_spec.errors import CheckpointError, UnsupportedError
from tests.golden.runner import DATA, load_case
from tests.moe.v4 import v4_drafter, v4_target

STAGES = 2


def _exported(tmp_path: Path, **options: Any) -> tuple[Any, Path]:
    model = v4_target()
    v4_drafter(model, backbone={"num_layers": STAGES})
    export(model, tmp_path / "draft", quiet=True, **options)
    return model, tmp_path / "draft"


def test_written_names_and_types(tmp_path: Path) -> None:
    _, directory = _exported(tmp_path, dtype="bfloat16")
    tensors = load_file(directory / "model.safetensors")
    stage = ("attn_norm.weight", "ffn_norm.weight", "attn.attn_sink", "ffn.gate.weight", "ffn.gate.bias")
    stage += tuple(f"attn.{name}.weight" for name in ("wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "wo_a", "wo_b"))
    stage += tuple(f"ffn.experts.{e}.{w}.weight" for e in range(4) for w in ("w1", "w2", "w3"))
    stage += tuple(f"ffn.shared_experts.{w}.weight" for w in ("w1", "w2", "w3"))
    stage += tuple(f"hc_{site}_{part}" for site in ("attn", "ffn") for part in ("fn", "base", "scale"))
    last = ("norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale", "confidence_head.proj.weight")
    last += ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    expected = {f"mtp.{i}.{name}" for i in range(STAGES) for name in stage}
    expected |= {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight"} | {f"mtp.{STAGES - 1}.{name}" for name in last}
    assert set(tensors) == expected
    for name, tensor in tensors.items():
        kept = ".hc_" in name or ".ffn.gate." in name
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16), name
    n, width = 4, 32
    assert tensors["mtp.0.hc_attn_fn"].shape == ((2 + n) * n, n * width)
    assert tensors["mtp.1.hc_head_fn"].shape == (n, n * width)
    assert tensors["mtp.0.main_proj.weight"].shape == (width, STAGES * width)
    keys = json.loads((directory / "config.json").read_text())
    assert keys["dspark_target_layer_ids"] == [2, 3] and keys["n_mtp_layers"] == STAGES
    assert (keys["dspark_markov_rank"], keys["dspark_noise_token_id"], keys["dspark_block_size"]) == (6, 90, 4)
    assert (keys["hc_mult"], keys["hc_eps"], keys["hc_sinkhorn_iters"]) == (4, 1e-6, 20)


def test_names_agree_with_the_golden_layer() -> None:
    """The golden case lists transformers' names beside the original checkpoint's; ours follow both."""
    from modelopt_spec.checkpoints.layouts.deepseek_v4_names import expert_files, file_names

    case, _ = load_case(DATA / "deepseek_v4_layer.json")
    names = file_names(1)
    for theirs, original in case["original_checkpoint_names"].items():
        if "experts." in theirs and "shared" not in theirs:
            continue
        assert names[f"layers.0.{theirs}"] == original.replace("layers.{i}.", "mtp.0."), theirs
    files = {(ours, half): file for ours, expert, half, file in expert_files(1, 1) if expert == 0}
    assert files["layers.0.mlp.experts.gate_up_proj", 0] == "mtp.0.ffn.experts.0.w1.weight"
    assert files["layers.0.mlp.experts.gate_up_proj", 1] == "mtp.0.ffn.experts.0.w3.weight"
    assert files["layers.0.mlp.experts.down_proj", 0] == "mtp.0.ffn.experts.0.w2.weight"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    """Export, import: the same config, every weight bit by bit, and the same blocks."""
    model, directory = _exported(tmp_path, dtype=dtype)
    other = v4_target(dtype=getattr(torch, dtype))
    load_drafter(directory, other, quiet=True)
    ours, theirs = model.drafter, other.drafter
    assert theirs.config.backbone == ours.config.backbone
    for name, tensor in ours.state_dict().items():
        loaded = theirs.state_dict()[name]
        assert torch.equal(loaded, tensor.to(loaded.dtype)), name
        if any(part in name for part in ("_hc.", "hc_head", "mlp.gate")):
            assert loaded.dtype == torch.float32, name


def test_export_was_proven_by_the_plain_reading(tmp_path: Path) -> None:
    model = v4_target()
    v4_drafter(model, backbone={"num_layers": STAGES, "sliding_window": 8})
    report = export(model, tmp_path / "draft", quiet=True)
    assert report.layout == "deepseek_v4"
    assert {c.context for c in report.comparisons} == {1, 7, 33}
    assert report.worst_difference < 2e-5 and all(c.same_tokens for c in report.comparisons)


def _quantised(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A published mixture: MXFP4 experts, FP8 projections, the rest as it is; and what the weights then are."""
    stored, values = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        base = name.removesuffix(".weight")
        if ".experts." in name:
            stored[name], stored[f"{base}.scale"] = quantize_mxfp4(tensor)
            values[name] = dequantize_mxfp4(stored[name], stored[f"{base}.scale"])
        elif any(part in name for part in (".wq_", ".wkv", ".wo_", "main_proj", "shared_experts")):
            stored[name], stored[f"{base}.scale"] = quantize_fp8(tensor)
            values[name] = dequantize_fp8(stored[name], stored[f"{base}.scale"])
    return stored, values


def test_quantised_import_is_exact(tmp_path: Path) -> None:
    _, directory = _exported(tmp_path, dtype="bfloat16")
    stored, values = _quantised(load_file(directory / "model.safetensors"))
    (directory / "drafter_card.json").unlink()
    save_file(stored, directory / "model.safetensors")
    quantised = read_draft(directory).draft
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, directory / "model.safetensors")
    plain = read_draft(directory).draft
    assert set(quantised.tensors) == set(plain.tensors)
    for name, tensor in plain.tensors.items():
        assert torch.equal(quantised.tensors[name], tensor) and quantised.tensors[name].dtype == tensor.dtype, name
    assert quantised.tensors["main_proj.weight"].dtype == torch.bfloat16


def test_dequantisation_equals_the_formats() -> None:
    """Every code of both formats, times scales up to the ends of bfloat16."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.tensor([[100], [127], [130], [140]] * 4, dtype=torch.uint8)
    values = dequantize_mxfp4(codes.view(torch.int8), scales.view(torch.float8_e8m0fnu))
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for row in range(16):
        for column in range(32):
            code = int(codes[row, column // 2]) >> (4 * (column % 2)) & 15
            want = table[code % 8] * (-1 if code >= 8 else 1) * 2.0 ** (int(scales[row, 0]) - 127)
            assert float(values[row, column]) == want
    weight = torch.randn(130, 140).to(torch.float8_e4m3fn)
    scale = torch.tensor([[120, 127], [129, 90]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    exact = dequantize_fp8(weight, scale)
    assert exact.dtype == torch.bfloat16
    assert float(exact[129, 139]) == float(weight[129, 139].float()) * 2.0 ** (90 - 127)
    assert float(exact[0, 0]) == float(weight[0, 0].float()) * 2.0 ** (120 - 127)
    odd = dequantize_fp8(weight, torch.full((2, 2), 0.1))
    assert odd.dtype == torch.float32, "a float scale may need more bits than bfloat16 has"
    with pytest.raises(CheckpointError, match="NaN"):
        power_of_two(torch.tensor([255], dtype=torch.uint8))


@pytest.mark.parametrize("quantise", [quantize_fp8, quantize_mxfp4])
def test_quantising_twice_changes_nothing(quantise: Any) -> None:
    undo = {quantize_fp8: dequantize_fp8, quantize_mxfp4: dequantize_mxfp4}[quantise]
    once = undo(*quantise(torch.randn(150, 160)))
    assert torch.equal(undo(*quantise(once)).float(), once.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head": {"type": "gated", "rank": 6}}, "head.type vanilla"),
        ({"target_layer_ids": [1, 2, 3]}, "3 taps, 2 stages"),
        ({"layout": "bonus_anchor"}, "anchor_first"),
        ({"confidence": {"enabled": True, "with_markov": False}}, "with_markov true"),
    ],
)
def test_refuses_what_readers_lack(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = v4_target()
    v4_drafter(model, backbone={"num_layers": STAGES}, **change)
    with pytest.raises(UnsupportedError, match=message):
        export(model, tmp_path / "draft", quiet=True)
    assert not (tmp_path / "draft").exists()


def test_dense_layouts_refuse_it_and_name_this_one() -> None:
    model = v4_target()
    drafter = v4_drafter(model, backbone={"num_layers": STAGES})
    reason = LAYOUTS["deepspec"].refuses(drafter.config)
    assert reason is not None and "deepseek_v4" in reason


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    _, directory = _exported(tmp_path)
    good = load_file(directory / "model.safetensors")

    def broken(tensors: dict[str, Tensor]) -> str:
        save_file(tensors, directory / "model.safetensors")
        with pytest.raises(CheckpointError) as error:
            read_draft(directory)
        return str(error.value)

    assert "mtp.1.ffn.experts.3.w2.weight" in broken(
        {name: tensor for name, tensor in good.items() if name != "mtp.1.ffn.experts.3.w2.weight"}
    )
    assert "mtp.0.e_proj.weight" in broken({**good, "mtp.0.e_proj.weight": torch.zeros(2)})
    assert "mtp.0.attn.wkv.weight" in broken({**good, "mtp.0.attn.wkv.weight": torch.zeros(3, 3)})
    packed, _ = quantize_mxfp4(good["mtp.0.ffn.experts.0.w1.weight"])
    assert "mtp.0.ffn.experts.0.w1.scale" in broken({**good, "mtp.0.ffn.experts.0.w1.weight": packed})
