"""FP8, NVFP4 and INT8 drafters: what ModelOpt computes in memory is what the written files stand for."""

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_spec.checkpoints.compare import draft_block
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter, read_draft
from modelopt_spec.checkpoints.independent_packed import unpacked
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.checkpoints.quantise import EXCLUDED, FORMATS, float_weights, nvfp4_rounded, pack, quantise
from modelopt_spec.checkpoints.store import save
from modelopt_spec.conversion import convert
from modelopt_spec.decoding.generate import generate
from modelopt_spec.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoints.drafts import converted, randomise
from tests.tiny import tiny

QUANTISED = {f"layers.{i}.{part}" for i in range(3) for part in (
    "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
)}  # fmt: skip


def blocks_of(model, *, seed=0):
    """One block of a model's drafter after noise as context."""
    taps = torch.randn(9, 96, generator=torch.Generator().manual_seed(seed))
    return draft_block(model.drafter, taps, 3, model.get_input_embeddings(), model.lm_head)


def quantised(name, case="vanilla", **options):
    model = converted(case)
    layers = quantise(model.drafter, name, lambda: blocks_of(model), **options)
    return model, layers


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """One exported directory for each format, not to be changed."""
    root = tmp_path_factory.mktemp("quantised")
    for name in FORMATS:
        export(quantised(name)[0], root / name, dtype="bfloat16", quiet=True)
    return root


@pytest.mark.parametrize("name", FORMATS)
def test_files_stand_for_the_weights_that_modelopt_computes_with(name):
    model, layers = quantised(name)
    assert set(layers) == QUANTISED
    packed = pack(model.drafter)
    weights = float_weights(packed)
    assert set(weights) == {f"{layer}.weight" for layer in QUANTISED}
    for weight_name, weight in weights.items():
        module = model.drafter.get_submodule(weight_name.removesuffix(".weight"))
        rounded = module.weight_quantizer(module.weight).detach()
        assert torch.allclose(weight, rounded, atol=1e-6), weight_name
        assert not torch.equal(weight, module.weight), weight_name


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_input_scales_are_those_of_the_calibrated_blocks(name):
    model, _ = quantised(name)
    largest = {"fp8": 448.0, "nvfp4": 6.0 * 448.0}[name]
    for layer, parts in pack(model.drafter).layers.items():
        amax = model.drafter.get_submodule(layer).input_quantizer.amax
        assert torch.allclose(parts["input_scale"] * largest, amax)
        assert 0 < float(amax) < 100


@pytest.mark.parametrize("name", FORMATS)
def test_layers_that_engines_fuse_share_a_scale(name):
    packed = pack(quantised(name)[0].drafter)
    for index in range(3):
        gate, up = (packed.layers[f"layers.{index}.mlp.{part}_proj"] for part in ("gate", "up"))
        for scale in {"fp8": ("weight_scale", "input_scale"), "nvfp4": ("weight_scale_2", "input_scale"), "int8": ()}[
            name
        ]:
            assert torch.equal(gate[scale], up[scale])


def test_nvfp4_rounding():
    """Exact values stay, halves go to the even code, and a block of zeros stays zero."""
    exact = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0])
    amax = torch.tensor(6.0 * 448.0)
    assert torch.equal(nvfp4_rounded(exact, amax), exact)
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 8)
    assert nvfp4_rounded(halves, amax)[:8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert torch.equal(nvfp4_rounded(-halves, amax), -nvfp4_rounded(halves, amax))
    assert torch.equal(nvfp4_rounded(torch.zeros(2, 32), torch.tensor(1.0)), torch.zeros(2, 32))
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    error = (nvfp4_rounded(values, values.abs().max()) - values).abs().max() / values.abs().max()
    assert error < 0.2


@pytest.mark.parametrize("name", FORMATS)
def test_two_readings_of_the_files_agree(exports, name):
    config = json.loads((exports / name / "config.json").read_text())
    tensors = load_file(exports / name / "model.safetensors")
    plain = unpacked(config, tensors)
    packed = pack(quantised(name)[0].drafter)
    for weight_name, weight in float_weights(packed).items():
        assert torch.allclose(plain[weight_name], weight, rtol=1e-6, atol=0), weight_name
    assert not any(n.endswith("_scale") for n in plain)


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("fp8", {"vllm", "sglang", "tensorrt_llm"}),
        ("nvfp4", {"vllm", "sglang", "tensorrt_llm"}),
        ("int8", {"tensorrt_llm"}),
    ],
)
def test_directory_says_how_it_is_quantised(exports, name, engines):
    directory = exports / name
    config = json.loads((directory / "config.json").read_text())
    whole = json.loads((directory / "hf_quant_config.json").read_text())
    algorithm = FORMATS[name].algorithm
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert config["quantization_config"]["quant_algo"] == whole["quantization"]["quant_algo"] == algorithm
    assert config["dtype"] == "bfloat16"
    ignored = config["quantization_config"]["ignore"]
    assert {"lm_head", "fc", "markov_head", "*.self_attn.qkv_proj", "*.self_attn.k_proj"} <= set(ignored)
    card = json.loads((directory / "drafter_card.json").read_text())
    assert set(card["engines"]["load"]) == engines
    assert "quantised" in card["engines"]["refused"]["llama.cpp"]
    report = check(directory, tiny("llama"))
    assert report.ok
    assert [fact.does for fact in report.facts if fact.name == "quantisation"] == [algorithm] * len(engines)


@pytest.mark.parametrize("name", FORMATS)
def test_imports_as_a_whole_drafter_that_trains_on(exports, name):
    imported = read_draft(exports / name)
    assert {t.dtype for t in imported.draft.tensors.values()} == {torch.bfloat16}
    model = load_drafter(exports / name, tiny("llama"), quiet=True)
    whole, reference = blocks_of(model.float()), blocks_of(converted())
    error = (whole.hidden - reference.hidden).abs().max() / reference.hidden.abs().max()
    assert 1e-4 < error < {"fp8": 0.3, "nvfp4": 0.8, "int8": 0.1}[name]


def test_cases_with_other_heads(tmp_path):
    for case, engine in (("dflash", "vllm"), ("dflash_bonus", "vllm"), ("domino", "sglang")):
        report = export(quantised("fp8", case)[0], tmp_path / case, engines=[engine], dtype="bfloat16", quiet=True)
        assert report.quantization == "FP8"
        ignored = json.loads((tmp_path / case / "config.json").read_text())["quantization_config"]["ignore"]
        assert "markov_head" in ignored
        assert {t.dtype for t in read_draft(tmp_path / case).draft.tensors.values()} == {torch.bfloat16}
    line = report.launch["sglang"]
    assert "--speculative-draft-model-quantization modelopt_fp8" in line


def test_everything_may_be_quantised(tmp_path):
    model, layers = quantised("int8", exclude=("lm_head", "embed_tokens", "markov_head", "confidence_head"))
    assert {"fc", "layers.0.self_attn.q_proj"} <= set(layers)
    export(model, tmp_path / "out", engines=["tensorrt_llm"], dtype="bfloat16", quiet=True)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "fc" not in ignored
    assert "*.self_attn.qkv_proj" not in ignored
    assert {t.dtype for t in read_draft(tmp_path / "out").draft.tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_runs_through_the_quantised_layers(name):
    """What is measured after quantising is the rounded drafter: confidences move, the target's tokens stay."""
    model = converted()
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(2))
    before = generate(model, ids, max_new_tokens=10)
    quantise(model.drafter, name, lambda: generate(model, ids, max_new_tokens=10))
    after = generate(model, ids, max_new_tokens=10)
    assert before.sequences.tolist() == after.sequences.tolist()
    first, second = (r.rounds[0].confidence_logits for r in (before, after))
    moved = max(abs(a - b) for a, b in zip(first, second))
    assert 1e-4 < moved < 5.0


def test_layers_of_one_output_are_packed_too():
    """The confidence head has one row: its scale for each output is a single number."""
    model, layers = quantised("int8", exclude=[name for name in EXCLUDED if name != "confidence_head"])
    assert set(layers) == QUANTISED | {"confidence_head.proj"}
    weight = float_weights(pack(model.drafter))["confidence_head.proj.weight"]
    module = model.drafter.get_submodule("confidence_head.proj")
    assert torch.allclose(weight, module.weight_quantizer(module.weight).detach(), atol=1e-6)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_mistakes(tmp_path):
    model = converted()
    with pytest.raises(ConfigError, match=r"'fp4' is unknown.*Did you mean"):
        quantise(model.drafter, "fp4", lambda: None)
    with pytest.raises(ConfigError, match=r"exclude names 'nothing', which is no module.*Its modules: .*down_proj"):
        quantise(model.drafter, "fp8", lambda: None, exclude=("nothing",))
    with pytest.raises(ConfigError, match=r"exclude names 'o_prj'.*Did you mean 'o_proj'"):
        quantise(model.drafter, "fp8", lambda: None, exclude=("o_prj", *EXCLUDED))
    with pytest.raises(ConfigError, match="exclude is 'fc': it must be a list"):
        quantise(model.drafter, "fp8", lambda: None, exclude="fc")
    with pytest.raises(ConfigError, match="leaves no linear layer"):
        quantise(model.drafter, "fp8", lambda: None, exclude=("layers", *EXCLUDED))
    with pytest.raises(ConfigError, match="calibration ran nothing"):
        quantise(copy.deepcopy(model).drafter, "fp8", lambda: None)
    model, _ = quantised("fp8")
    with pytest.raises(ConfigError, match="quantised already"):
        quantise(model.drafter, "fp8", lambda: None)
    with pytest.raises(UnsupportedError, match=r"llama.cpp.*not known to load a draft quantised as FP8"):
        export(model, tmp_path / "a", engines=["llama.cpp"], dtype="bfloat16", quiet=True)
    with pytest.raises(UnsupportedError, match="dtype=bfloat16"):
        export(model, tmp_path / "b", engines=["vllm"], quiet=True)
    with pytest.raises(CheckpointError, match="quantised, and a checkpoint holds whole weights"):
        save(model, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_widths_that_nvfp4_cannot_pack():
    model = tiny("llama")
    shape = {"mask_token_id": 96, "head": {"rank": 6}, "backbone": {"intermediate_size": 40}}
    convert(model, ("dspark", shape), quiet=True)
    randomise(model.drafter)
    with pytest.raises(UnsupportedError, match=r"down_proj has 40 inputs.*groups of 16"):
        quantise(model.drafter, "nvfp4", lambda: None)


def edited(source, out, change):
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, out / "model.safetensors")
    return out


SCALE = "layers.0.mlp.up_proj.weight_scale"


@pytest.mark.parametrize(
    ("fact", "change"),
    [
        ("quantisation", lambda c, t: c.pop("quantization_config")),
        ("quantisation", lambda c, t: c["quantization_config"].update(quant_algo="NVFP4")),
        ("quantisation", lambda c, t: c["quantization_config"].update(quant_algo="FP8_PB_WO")),
        ("quantisation", lambda c, t: c["quantization_config"].update(quant_method="fp8")),
        ("quantisation", lambda c, t: c["quantization_config"]["ignore"].remove("fc")),
        ("quantisation", lambda c, t: c["quantization_config"]["ignore"].append("*.mlp.up_proj")),
        ("quantisation", lambda c, t: t.pop(SCALE)),
        ("quantisation", lambda c, t: t.update({SCALE: torch.ones(3)})),
        ("weights", lambda c, t: t[SCALE].mul_(2.0)),
    ],
)
def test_the_preflight_names_it(tmp_path, exports, fact, change):
    directory = edited(exports / "fp8", tmp_path / "changed", change)
    assert check(directory, tiny("llama")).disagreements == (fact,)


def test_the_other_file_counts_too(tmp_path, exports):
    directory = edited(exports / "fp8", tmp_path / "changed", lambda c, t: None)
    path = directory / "hf_quant_config.json"
    whole = json.loads(path.read_text())
    whole["quantization"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(whole))
    assert check(directory, tiny("llama")).disagreements == ("quantisation",)
    path.unlink()
    assert check(directory, tiny("llama")).disagreements == ("quantisation",)


def test_damaged_scales_do_not_import(tmp_path, exports):
    directory = edited(exports / "nvfp4", tmp_path / "changed", lambda c, t: t.pop("layers.0.mlp.up_proj.input_scale"))
    with pytest.raises(CheckpointError, match=r"up_proj.weight.*needs its input_scale"):
        read_draft(directory)


# ---- a quantised target ----------------------------------------------------------------------------------------------


# ---- the documentation -----------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs" / "checkpoints.md"
BEGIN, END = "<!-- quantised: begin -->\n", "<!-- quantised: end -->\n"


def measured():
    """The table of the recorded `mtsp quantize` runs, and what ran; nothing where no run is recorded."""
    record = DOCS.parent / "results" / "quantised.json"
    if not record.is_file():
        return ""
    content = json.loads(record.read_text())
    lines = [
        "| format | accepted length before | after | rounds | weights before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, report in content["results"].items():
        before, after = (
            f"{part['tau']:.3f} ({part['tau_interval'][0]:.3f} to {part['tau_interval'][1]:.3f})"
            for part in (report["before"], report["after"])
        )
        sizes = [f"{report['bytes'][when] / 1e6:.1f} MB" for when in ("before", "after")]
        lines.append(f"| `{name}` | {before} | {after} | {report['after']['rounds']} | {' | '.join(sizes)} |")
    return f"{content['text']}\n\n    {content['command']}\n\n" + "\n".join(lines) + "\n"


def test_documentation_holds_the_measurements():
    """Set MTSP_UPDATE_DOCS=1 to write them."""
    before, rest = DOCS.read_text().split(BEGIN)
    _, after = rest.split(END)
    current = f"{before}{BEGIN}{measured()}{END}{after}"
    if os.environ.get("MTSP_UPDATE_DOCS") == "1":
        DOCS.write_text(current)
    assert DOCS.read_text() == current, "docs/checkpoints.md is out of date: run this test with MTSP_UPDATE_DOCS=1"
