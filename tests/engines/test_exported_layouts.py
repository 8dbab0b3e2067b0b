"""Exported drafts in every layout and block layout that vLLM and llama.cpp load: what they propose is what we draft."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from modelopt_spec.checkpoints.engines.llama_cpp_runner import EngineError, LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_timings import Generation
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools, convert_to_gguf, spec_type_of
from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter
from modelopt_spec.errors import UnsupportedError
from tests.engines.comparing import ON_A_BUSY_MACHINE, assert_vllm_blocks_are_ours, our_blocks, proposed_blocks
from tests.engines.exported import KINDS, RANK_ZERO, ZERO_HEAD, drafts_and_method, export_case, fitted, target_model
from tests.engines.modelopt_maker import modelopt_block, write_modelopt_draft
from tests.engines.our_drafts import load, our_answers
from tests.engines.proofs import Proof
from tests.engines.vllm_runner import VllmReply, VllmRequest, reply_of, run_vllm

pytestmark = [pytest.mark.engines, pytest.mark.timeout(2400)]

DFLASH, VANILLA = "DFlash, bonus anchor (z-lab)", "DSpark vanilla"
BONUS, REDUCED = "DSpark vanilla, bonus anchor", "DSpark vanilla, reduced vocabulary"
IN_VLLM = (
    (DFLASH, "zlab"),
    (DFLASH, "speculators"),
    (ZERO_HEAD, "deepspec"),
    (VANILLA, "deepspec"),
    (VANILLA, "nemotron"),
    (VANILLA, "speculators"),
    (BONUS, "deepspec"),
    (BONUS, "speculators"),
    (REDUCED, "deepspec"),
    (REDUCED, "speculators"),
)
IN_LLAMA_CPP = (
    (DFLASH, "zlab"),
    (RANK_ZERO, "deepspec"),
    (VANILLA, "deepspec"),
    (VANILLA, "nemotron"),
    (VANILLA, "speculators"),
    (BONUS, "deepspec"),
)
MODELOPT = "nvidia-modelopt 0.47's DSpark"
NEW_TOKENS = 12
FITTED = 1
"""The prompt that drafts are fitted to; it is the second of two."""

Prompts = tuple[tuple[int, ...], ...]
Case = tuple[str, str]


def name_of(case: Case) -> str:
    return ", ".join(case)


@pytest.fixture(scope="module")
def two(prompts: Prompts) -> Prompts:
    return prompts[:2]


@pytest.fixture(scope="module")
def model_of(target_dir: Path, prompts: Prompts, answers: Prompts) -> Callable[[str], nn.Module]:
    """The target with a fitted drafter of a kind, made once; the two anchor-first drafts without a head are one."""
    known: dict[str, nn.Module] = {}

    def get(kind: str) -> nn.Module:
        kind = RANK_ZERO if kind == ZERO_HEAD else kind
        if kind not in known:
            whole = get(VANILLA).drafter if kind == REDUCED else None
            known[kind] = fitted(target_dir, kind, prompts[FITTED], answers[FITTED][: NEW_TOKENS + 1], whole)
        return known[kind]

    return get


@pytest.fixture(scope="module")
def directory_of(
    model_of: Callable[[str], nn.Module], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], Path]:
    """The exported directory of a case, written once."""
    known: dict[Case, Path] = {}

    def get(case: Case) -> Path:
        if case not in known:
            known[case] = export_case(model_of(case[0]), *case, tmp_path_factory.mktemp("exported") / "draft")
        return known[case]

    return get


@pytest.fixture(scope="module")
def modelopt_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model that nvidia-modelopt converted, and its own export, imported and written for the engines."""
    place = tmp_path_factory.mktemp("modelopt")
    theirs = write_modelopt_draft(target_dir, place / "theirs")
    trained_with = {"backbone.rope_parameters": dict(theirs.dflash_config.rope_parameters)}
    ours = load_drafter(place / "theirs", target_model(target_dir), overrides=trained_with, quiet=True)
    with contextlib.redirect_stdout(io.StringIO()):
        export(ours, place / "draft", engines=["vllm", "llama.cpp", "sglang"], quiet=True)
    return theirs, place / "draft"


@pytest.fixture(scope="module")
def in_vllm(
    request: pytest.FixtureRequest,
    vllm: Path,
    target_dir: Path,
    two: Prompts,
    directory_of: Callable[[Case], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, VllmReply | RuntimeError]:
    """Every case whose test is to run, one after the other in one process, behind the target alone."""

    def asked(draft: Path, kind: str) -> VllmRequest:
        count, method = drafts_and_method(kind)
        return VllmRequest(str(target_dir), two, str(draft), method, count, max_tokens=NEW_TOKENS)

    requests = {"alone": VllmRequest(str(target_dir), two, max_tokens=NEW_TOKENS)}
    collected = {item.name for item in request.session.items if item.path == request.path}
    for case in IN_VLLM:
        if f"test_vllm_proposes_what_we_draft[{name_of(case)}]" in collected:
            requests[name_of(case)] = asked(directory_of(case), case[0])
    if "test_vllm_proposes_what_nvidia_modelopt_computes" in collected:
        requests[MODELOPT] = asked(request.getfixturevalue("modelopt_dir")[1], VANILLA)
    results = run_vllm(list(requests.values()), vllm, tmp_path_factory.mktemp("vllm"))
    return dict(zip(requests, results, strict=True))


@pytest.mark.parametrize("case", IN_VLLM, ids=name_of)
def test_vllm_proposes_what_we_draft(
    case: Case,
    in_vllm: dict[str, VllmReply | RuntimeError],
    directory_of: Callable[[Case], Path],
    target_dir: Path,
    two: Prompts,
    proof: Proof,
) -> None:
    reply = reply_of(in_vllm[name_of(case)])
    say(proof, "vllm", reply.version, case)
    plain = [generation.tokens for generation in reply_of(in_vllm["alone"]).generations]
    assert [generation.tokens for generation in reply.generations] == plain
    ours = our_answers(load(target_dir, directory_of(case)), two, drafts_and_method(case[0])[0], NEW_TOKENS)
    compared = assert_vllm_blocks_are_ours(two, reply.generations, ours)
    assert compared.accepted > 0, "a draft that was fitted to an answer must be accepted there"
    proof.found("greedy tokens equal to vLLM's own without the draft", sum(map(len, plain)))
    proof.found(f"proposed blocks equal to ours, {compared.accepted} draft tokens accepted", compared.blocks)
    if compared.confidences:
        proof.found("confidences equal to ours", compared.confidences, compared.worst_confidence)


def test_vllm_proposes_what_nvidia_modelopt_computes(
    in_vllm: dict[str, VllmReply | RuntimeError],
    modelopt_dir: tuple[nn.Module, Path],
    target_dir: Path,
    two: Prompts,
    proof: Proof,
) -> None:
    """Its own convert and exporter, our import and export, the proposals of vLLM, its own forward pass."""
    theirs, directory = modelopt_dir
    reply = reply_of(in_vllm[MODELOPT])
    say(proof, "vllm", reply.version, (MODELOPT, "modelopt, imported and written as deepspec"))
    plain = [generation.tokens for generation in reply_of(in_vllm["alone"]).generations]
    assert [generation.tokens for generation in reply.generations] == plain
    checked = 0
    for prompt, generation in zip(two, reply.generations):
        row = (*prompt, *generation.tokens)
        blocks = [block for block in generation.blocks if block.position < len(row) - 1]
        for block in blocks:
            anchor, drafted = modelopt_block(theirs, row[: block.position], len(block.drafted))
            assert (anchor, drafted) == (block.anchor, list(block.drafted))
        checked += len(blocks)
    proof.found("greedy tokens equal to vLLM's own without the draft", sum(map(len, plain)))
    proof.found("proposed blocks equal to nvidia-modelopt's own forward pass", checked)
    compared = assert_vllm_blocks_are_ours(two, reply.generations, our_answers(load(target_dir, directory), two, 7, 12))
    proof.found("confidences equal to ours", compared.confidences, compared.worst_confidence)


@pytest.fixture(scope="module")
def llama_alone(llama_cpp: LlamaCppTools, target_gguf: Path, two: Prompts) -> list[Generation]:
    with LlamaServer(llama_cpp, ServerSettings(target_gguf, **ON_A_BUSY_MACHINE)) as server:
        return [server.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in two]


@pytest.mark.parametrize("case", IN_LLAMA_CPP, ids=name_of)
def test_llama_cpp_proposes_what_we_draft(
    case: Case,
    llama_cpp: LlamaCppTools,
    llama_cpp_version: str,
    directory_of: Callable[[Case], Path],
    llama_alone: list[Generation],
    target_dir: Path,
    target_gguf: Path,
    two: Prompts,
    proof: Proof,
    tmp_path: Path,
) -> None:
    say(proof, "llama.cpp", llama_cpp_version, case)
    directory, count = directory_of(case), drafts_and_method(case[0])[0]
    gguf = convert_to_gguf(directory, tmp_path / "draft.gguf", llama_cpp, target_dir=target_dir)
    kind, log = spec_type_of(directory), tmp_path / "server.log"
    settings = ServerSettings(target_gguf, gguf, kind, count, extra_args=("-lv", "5"), **ON_A_BUSY_MACHINE)
    with LlamaServer(llama_cpp, settings, log) as server:
        served = [server.generate(prompt, max_new_tokens=NEW_TOKENS) for prompt in two]
    assert [generation.tokens for generation in served] == [generation.tokens for generation in llama_alone]
    ours = our_answers(load(target_dir, directory), two, count, NEW_TOKENS)
    assert [answer.tokens for answer in ours] == [generation.tokens for generation in served]
    assert proposed_blocks(log) == our_blocks(ours)
    accepted = [sum(record.accepted for record in answer.rounds) for answer in ours]
    assert not served[FITTED].stopped_at_eos, "tokens behind an end of text count as accepted there, not here"
    assert served[FITTED].draft_n_accepted == accepted[FITTED]
    assert accepted[FITTED] > 0, "a draft that was fitted to an answer must be accepted there"
    proof.found("greedy tokens equal to llama.cpp's own without the draft", sum(len(own.tokens) for own in served))
    proof.found(f"proposed blocks equal to ours, {sum(accepted)} draft tokens accepted", len(our_blocks(ours)))


def test_an_older_llama_cpp_refuses_a_reduced_vocabulary(
    llama_cpp: LlamaCppTools, directory_of: Callable[[Case], Path], target_dir: Path, target_gguf: Path, tmp_path: Path
) -> None:
    """The prebuilt server does not read ``d2t`` of such drafts yet; it stops instead of drafting other tokens."""
    directory = directory_of((REDUCED, "deepspec"))
    gguf = convert_to_gguf(directory, tmp_path / "draft.gguf", llama_cpp, target_dir=target_dir)
    settings = ServerSettings(target_gguf, gguf, spec_type_of(directory), 7, **ON_A_BUSY_MACHINE)
    with pytest.raises(EngineError, match=r"markov_w2.*wrong shape"):
        LlamaServer(llama_cpp, settings, tmp_path / "server.log").start()


def test_what_no_engine_loads_is_refused(model_of: Callable[[str], nn.Module], tmp_path: Path) -> None:
    """Rank 0 kills vLLM's CPU build, and llama.cpp loads no Markov head, of zeros or not, without a confidence head."""
    with pytest.raises(UnsupportedError, match="markov_rank 0"):
        export(model_of(RANK_ZERO), tmp_path / "draft", engines=["vllm"], layout="deepspec", quiet=True)
    with pytest.raises(UnsupportedError, match="with a confidence head beside it"):
        export(model_of(RANK_ZERO), tmp_path / "draft", engines=["vllm", "llama.cpp"], quiet=True)
    assert not list(tmp_path.iterdir())


def say(proof: Proof, engine: str, version: str, case: Case) -> None:
    """What a case serves."""
    settings: dict[str, Any] = KINDS[case[0]][1] if case[0] in KINDS else KINDS[VANILLA][1]
    vanilla = "head" in settings
    proof.serves(
        engine,
        version,
        drafter=case[0],
        layout=case[1],
        block_layout=settings.get("layout", "anchor_first"),
        head="vanilla" if vanilla else "none",
        draft="random" if case[0] == MODELOPT else "fitted to one of two answers",
        target="SmolLM2-135M-Instruct, float32",
    )
