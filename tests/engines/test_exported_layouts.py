"""Exported drafts in every layout and block layout that vLLM and llama.cpp load: what they propose is what we draft."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools, convert_to_gguf, spec_type_of
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter
from modelopt_spec.conversion import convert
from tests.checkpoints.drafts import randomise
from tests.engines.our_drafts import load, our_answers
from tests.engines.test_llama_cpp import ON_A_BUSY_MACHINE, proposed_blocks
from tests.engines.test_vllm import assert_blocks_are_ours
from tests.engines.vllm_runner import VllmRequest, run_vllm

pytestmark = pytest.mark.engines

VANILLA = {"head": {"type": "vanilla", "rank": 16}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "headless, anchor first": ("dflash", "deepspec", {}),
    "headless, bonus anchor": ("dflash", "zlab", {"layout": "bonus_anchor"}),
    "vanilla": ("dspark", "deepspec", VANILLA),
    "vanilla, bonus anchor": ("dspark", "deepspec", {**VANILLA, "layout": "bonus_anchor"}),
    "nemotron": ("dspark", "nemotron", VANILLA),
    "speculators": ("dspark", "speculators", VANILLA),
    "speculators, bonus anchor": ("dspark", "speculators", {**VANILLA, "layout": "bonus_anchor"}),
    "speculators, reduced vocabulary": ("dspark", "speculators", {**VANILLA, "draft_vocab_size": 8192}),
    "speculators DFlash": ("dflash", "speculators", {"layout": "bonus_anchor"}),
    "reduced vocabulary": ("dspark", "deepspec", {**VANILLA, "draft_vocab_size": 8192}),
}
IN_LLAMA_CPP = ("headless, anchor first", "vanilla, bonus anchor", "nemotron", "speculators", "reduced vocabulary")


def target_model(directory: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def spread(drafter: nn.Module) -> None:
    """Random weights of a size at which the backbone, the taps and the head all decide proposals."""
    randomise(drafter)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.ndim == 2 and "markov_w1" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "markov_w1" in name:
                parameter.normal_()
        table = getattr(drafter, "d2t", None)
        if table is not None:
            table.copy_(torch.arange(len(table)) * 5)


@pytest.fixture
def exported(request: pytest.FixtureRequest, target_dir: Path, tmp_path: Path) -> Path:
    """A random draft of one case, exported."""
    mode, layout, settings = CASES[request.param]
    torch.manual_seed(0)
    model = target_model(target_dir)
    shape = {"block_size": 7, "mask_token_id": 4, "target_layer_ids": (9, 28), "backbone": {"num_layers": 2}}
    convert(model, (mode, {**shape, **settings}), quiet=True)
    spread(model.drafter)
    export(model, tmp_path / "draft", layout=layout, quiet=True)
    return tmp_path / "draft"


def method_and_count(case: str) -> tuple[str, int]:
    mode, _, settings = CASES[case]
    bonus = settings.get("layout") == "bonus_anchor"
    dflash = mode == "dflash" and bonus
    return ("dflash" if dflash else "dspark"), (6 if bonus else 7)


@pytest.mark.parametrize(("exported", "case"), [(case, case) for case in CASES], indirect=["exported"])
def test_vllm_proposes_what_we_draft(
    exported: Path, case: str, vllm: Path, target_dir: Path, prompts: Any, answers: Any, tmp_path: Path
) -> None:
    method, count = method_and_count(case)
    request = VllmRequest(str(target_dir), prompts[:2], str(exported), method, count, max_tokens=12)
    generations = run_vllm(request, vllm, tmp_path / "run")
    assert [generation.tokens for generation in generations] == [answer[:12] for answer in answers[:2]]
    ours = our_answers(load(target_dir, exported), prompts[:2], count, 12)
    assert_blocks_are_ours(prompts[:2], generations, ours)


@pytest.mark.parametrize(("exported", "case"), [(case, case) for case in IN_LLAMA_CPP], indirect=["exported"])
def test_llama_cpp_proposes_what_we_draft(
    exported: Path,
    case: str,
    llama_cpp: LlamaCppTools,
    target_dir: Path,
    target_gguf: Path,
    prompts: Any,
    tmp_path: Path,
) -> None:
    _, count = method_and_count(case)
    gguf = convert_to_gguf(exported, tmp_path / "draft.gguf", llama_cpp, target_dir=target_dir)
    settings = ServerSettings(
        target_gguf, gguf, spec_type_of(exported), count, extra_args=("-lv", "5"), **ON_A_BUSY_MACHINE
    )
    log = tmp_path / "server.log"
    with LlamaServer(llama_cpp, settings, log) as server:
        generation = server.generate(prompts[1], max_new_tokens=12, ignore_eos=True)
    (ours,) = our_answers(load(target_dir, exported), prompts[1:2], count, 12, ignore_eos=True)
    assert ours.tokens == generation.tokens
    assert proposed_blocks(log) == [list(record.drafted) for record in ours.blocks().values()]


def test_a_draft_of_nvidia_modelopt_serves_once_it_is_exported(
    vllm: Path, target_dir: Path, prompts: Any, answers: Any, tmp_path: Path
) -> None:
    """Its own convert and exporter, our import and export, and the proposals of vLLM."""
    import modelopt.torch.speculative as speculative

    torch.manual_seed(0)
    model = target_model(target_dir)
    shape = model.config
    architecture = {
        "num_hidden_layers": 2,
        "head_dim": shape.head_dim,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "intermediate_size": shape.intermediate_size,
        "target_layer_ids": [9, 28],
        "projector_type": "dspark",
        "markov_rank": 16,
        "markov_head_type": "vanilla",
        "use_confidence_head": True,
    }
    config = {
        "dflash_block_size": 7,
        "dflash_mask_token_id": 4,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": architecture,
    }
    speculative.convert(model, [("dflash", config)])
    spread(model.dflash_module)
    with contextlib.redirect_stdout(io.StringIO()):
        model.get_exporter().export(tmp_path / "theirs")
    trained_with = {"backbone.rope_parameters": dict(model.dflash_config.rope_parameters)}
    ours = load_drafter(tmp_path / "theirs", target_model(target_dir), overrides=trained_with, quiet=True)
    export(ours, tmp_path / "draft", engines=["vllm", "llama.cpp", "sglang"], quiet=True)
    request = VllmRequest(str(target_dir), prompts[:2], str(tmp_path / "draft"), "dspark", 7, max_tokens=12)
    generations = run_vllm(request, vllm, tmp_path / "run")
    assert [generation.tokens for generation in generations] == [answer[:12] for answer in answers[:2]]
    assert_blocks_are_ours(prompts[:2], generations, our_answers(ours, prompts[:2], 7, 12))
