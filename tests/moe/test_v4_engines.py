"""How vLLM, SGLang and llama.cpp read a DeepSeek-V4 draft: names, keys, what they refuse, what kills them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import modelopt_spec as mtsp
from modelopt_spec.checkpoints.engines import ENGINES, plan_export
from modelopt_spec.checkpoints.engines.base import Directory, Serving
from modelopt_spec.checkpoints.engines.deepseek_v4 import PACKED_EXPERTS
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.layouts import Draft, get_layout
from modelopt_spec.checkpoints.layouts.deepseek_v4 import pack_experts
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import UnsupportedError
from tests.moe.v4 import v4_drafter, v4_target

STAGES, LAYOUT = 2, "deepseek_v4"
ATTENTION = "wq_a q_norm wq_b wkv kv_norm wo_a wo_b"
STAGE_NAMES = [
    "attn_norm.weight",
    "ffn_norm.weight",
    *(f"attn.{name}.weight" for name in ATTENTION.split()),
    "attn.attn_sink",
    "ffn.gate.weight",
    "ffn.gate.bias",
    *(f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)),
    *(f"ffn.experts.{e}.w{i}.weight" for e in range(4) for i in (1, 2, 3)),
    *(f"hc_{part}_{field}" for part in ("attn", "ffn") for field in ("fn", "base", "scale")),
]
LAST_NAMES = [
    "norm.weight",
    *(f"hc_head_{field}" for field in ("fn", "base", "scale")),
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
]


def _drafter(**backbone: Any) -> Drafter:
    return v4_drafter(v4_target(), backbone={"num_layers": STAGES, **backbone})


def _directory(drafter: Drafter, *, packed: bool = False, **changes: Any) -> Directory:
    """What an export writes, without writing it; a change to None removes the key."""
    layout = get_layout(LAYOUT)
    tensors = layout.write_tensors(Draft(drafter.config, dict(drafter.state_dict())))
    tensors = pack_experts(tensors) if packed else tensors
    keys = {**layout.write_config(drafter.config), **changes}
    types = {torch.float32: "F32", torch.int8: "I8", torch.float8_e8m0fnu: "F8_E8M0"}
    entries = {n: TensorEntry(n, types[t.dtype], tuple(t.shape), Path("x")) for n, t in tensors.items()}
    return Directory({key: value for key, value in keys.items() if value is not None}, entries)


def test_every_engine_finds_every_tensor_under_its_name() -> None:
    """vLLM and SGLang map ``mtp.{i}.`` to stage i and look for exactly these; llama.cpp's converter likewise."""
    expected = {"mtp.0.main_proj.weight", "mtp.0.main_norm.weight"}
    expected |= {f"mtp.{stage}.{name}" for stage in range(STAGES) for name in STAGE_NAMES}
    expected |= {f"mtp.{STAGES - 1}.{name}" for name in LAST_NAMES}
    directory = _directory(_drafter())
    assert set(directory.entries) == expected
    shapes = {name: entry.shape for name, entry in directory.entries.items()}
    streams, width = 4, 32
    assert shapes["mtp.0.main_proj.weight"] == (width, STAGES * width)
    assert shapes["mtp.1.hc_attn_fn"] == ((2 + streams) * streams, streams * width)
    assert shapes["mtp.1.hc_attn_base"] == ((2 + streams) * streams,) and shapes["mtp.1.hc_attn_scale"] == (3,)
    assert shapes["mtp.1.hc_head_fn"] == (streams, streams * width) and shapes["mtp.1.hc_head_scale"] == (1,)
    assert "mtp.1.confidence_head.proj.bias" not in shapes


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_reads_what_was_trained(engine: str) -> None:
    drafter = _drafter(window_rule="query" if engine == "llama.cpp" else "block")
    view = ENGINES[engine].reads(_directory(drafter, packed=engine == "llama.cpp"), TargetFacts())
    config, backbone = drafter.config, drafter.config.backbone
    assert view.fails == {}
    assert view.does["taps"] == config.target_layer_ids and view.does["block size"] == config.block_size
    assert view.does["mask token"] == config.mask_token_id and view.does["head rank"] == config.head.rank
    assert (view.does["window"], view.does["window rule"]) == (backbone.sliding_window, backbone.window_rule)
    assert view.does["shape"][0] == STAGES and view.does["confidence input"] == "hidden and token"


def _without(directory: Directory, *names: str) -> Directory:
    return Directory(directory.config, {n: e for n, e in directory.entries.items() if n not in names})


def _beside(directory: Directory, **keys: Any) -> Directory:
    """With a tensor of the target and its keys."""
    entry = TensorEntry("embed.weight", "F32", (97, 32), Path("x"))
    return Directory({**directory.config, **keys}, {**directory.entries, "embed.weight": entry})


BIAS, CONFIDENCE = "mtp.1.ffn.gate.bias", "mtp.1.confidence_head.proj.weight"
MARKOV = [f"mtp.1.markov_head.markov_w{i}.weight" for i in (1, 2)]
GOOD_TARGET = {"compress_ratios": [0, 4, 0, 128], "index_head_dim": 128}


@pytest.mark.parametrize(
    ("engine", "change", "fact", "message"),
    [
        ("vllm", lambda d: Directory({**d.config, "n_mtp_layers": None}, d.entries), "shape", "builds 3 stages"),
        ("vllm", lambda d: Directory({**d.config, "n_mtp_layers": 1}, d.entries), "shape", "builds 1 stages"),
        ("sglang", lambda d: Directory({**d.config, "dspark_target_layer_ids": [1, 2, 3]}, d.entries), "shape", "3 st"),
        ("vllm", lambda d: Directory({**d.config, "dspark_markov_rank": 0}, d.entries), "head rank", "> 0"),
        ("vllm", lambda d: _beside(d, compress_ratios=[0, 4, 0, 128]), "window", "2 zeros behind"),
        ("vllm", lambda d: _beside(d, compress_ratios=[0, 4, 0, 128, 4, 4]), "window", "2 zeros behind"),
        ("llama.cpp", lambda d: Directory({**d.config, "hc_mult": 2}, d.entries), "shape", "4 residual streams only"),
        ("llama.cpp", lambda d: _without(d, BIAS), "head", "gate.bias crashes"),
        ("llama.cpp", lambda d: _without(d, *MARKOV), "confidence head", "without the Markov"),
        ("llama.cpp", lambda d: _beside(d, **{**GOOD_TARGET, "compress_ratios": [0, 0, 128]}), "window", "ratio 4"),
        ("llama.cpp", lambda d: _beside(d, **{**GOOD_TARGET, "compress_ratios": [0, 4, 8]}), "window", r"\[8\]"),
        ("llama.cpp", lambda d: _beside(d, **{**GOOD_TARGET, "index_head_dim": 96}), "shape", "index_head_dim 96"),
        ("llama.cpp", lambda d: _beside(d, **{**GOOD_TARGET, "index_head_dim": 64, "head_dim": 64}), "shape", "64"),
    ],
)
def test_what_fails_on_loading(engine: str, change: Any, fact: str, message: str) -> None:
    directory = change(_directory(_drafter(), packed=engine == "llama.cpp"))
    fails = ENGINES[engine].reads(directory, TargetFacts()).fails
    assert re.search(message, fails.get(fact, "")), fails


def test_llama_cpp_takes_a_good_target_and_packed_experts_only() -> None:
    drafter = _drafter(window_rule="query")
    engine = ENGINES["llama.cpp"]
    assert engine.reads(_beside(_directory(drafter, packed=True), **GOOD_TARGET), TargetFacts()).fails == {}
    assert "MXFP4" in engine.reads(_directory(drafter), TargetFacts()).fails["dtype"]
    serving = Serving(drafter.config, LAYOUT, torch.float32)
    assert "export-beside" in (engine.refuses(serving) or "")
    assert engine.refuses(Serving(drafter.config, LAYOUT, torch.float32, quantization=PACKED_EXPERTS)) is None


@pytest.mark.parametrize(
    ("rule", "engine", "message"),
    [
        ("query", "vllm", "rule 'block'"),
        ("query", "sglang", "rule 'block'"),
        ("block", "llama.cpp", "rule 'query'"),
        ("block", "tensorrt_llm", "no DeepSeek-V4 draft"),
    ],
)
def test_refuses_before_anything_is_written(rule: str, engine: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        plan_export(_drafter(window_rule=rule).config, [engine])


def test_llama_cpp_has_four_streams() -> None:
    drafter = _drafter(window_rule="query", hyper_connection={"streams": 2})
    serving = Serving(drafter.config, LAYOUT, torch.float32, quantization=PACKED_EXPERTS)
    assert "4 residual streams only, not 2" in (ENGINES["llama.cpp"].refuses(serving) or "")


def test_export_for_engines(tmp_path: Path) -> None:
    """The same command as for a dense drafter; the preflight then compares blocks on the target's own features."""
    model = v4_target()
    v4_drafter(model, backbone={"num_layers": STAGES})
    report = export(model, tmp_path / "out", engines=["vllm", "sglang"], quiet=True)
    assert report.layout == LAYOUT and report.engines == ("vllm", "sglang")
    assert '"method": "dspark"' in report.launch["vllm"] and "DSPARK" in report.launch["sglang"]
    assert any("GPU" in note for note in report.notes)
    found = check(tmp_path / "out", model)
    assert found.ok and {fact.name for fact in found.facts} >= {"window rule", "taps", "block", "weights"}
    everything = export(model, tmp_path / "all", quiet=True)
    assert set(everything.refused) == {"llama.cpp", "tensorrt_llm"}


def test_hyper_connections_in_dense_layers_have_no_engine(tmp_path: Path) -> None:
    model = v4_target()
    config = {"block_size": 4, "mask_token_id": 90, "backbone": {"residual": "mhc", "mlp": "moe", "num_layers": 1}}
    mtsp.convert(model, ("dspark", {**config, "head": {"type": "vanilla", "rank": 6}}), quiet=True)
    with pytest.raises(UnsupportedError, match=r"modelopt_spec\.generate"):
        export(model, tmp_path / "out", quiet=True)
