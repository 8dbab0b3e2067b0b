"""`export`: from a trained drafter to a directory that engines load, proven before it appears."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from modelopt_spec.arguments import check_path
from modelopt_spec.checkpoints import store
from modelopt_spec.checkpoints.atomic import DRAFTER_FILES, atomic_directory, check_free
from modelopt_spec.checkpoints.card import CARD, build_card, provenance_of, target_identity
from modelopt_spec.checkpoints.compare import Comparison, StandIn, compare_block, rebuild
from modelopt_spec.checkpoints.engines import ExportPlan, get_engine, plan_export
from modelopt_spec.checkpoints.engines.base import drafts_of
from modelopt_spec.checkpoints.engines.llama_cpp_gguf import write_gguf
from modelopt_spec.checkpoints.files import parse_dtype, write_json, write_tensors
from modelopt_spec.checkpoints.independent_reader import IndependentDraft
from modelopt_spec.checkpoints.layouts import Draft, expected_shapes
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, kept_in_float32
from modelopt_spec.checkpoints.opening import recorded_target, shared_modules
from modelopt_spec.checkpoints.packing import QUANT_FILE, quantisation_of, quantization_config
from modelopt_spec.checkpoints.quantise import float_weights, is_quantised, pack
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.checkpoints.zero_head import needs_zero_head, with_zero_head
from modelopt_spec.config import DrafterConfig
from modelopt_spec.consoles import stderr_console
from modelopt_spec.disk import sha256_of
from modelopt_spec.drafter.drafter import Drafter
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.scheduling.scheduler_file import SCHEDULER_FILE
from modelopt_spec.scheduling.ship import ship, shippable

__all__ = ["CONTEXTS", "TOLERANCE", "ExportReport", "cast_draft", "draft_of", "export", "prove"]

GGUF_FILE = "draft.gguf"
CONTEXTS = (1, 7, 33)
"""Context lengths of the blocks that are compared before an export appears."""
TOLERANCE = 2e-4
"""Largest accepted relative difference of two float32 readings of the same weights."""


@dataclass(frozen=True)
class ExportReport:
    """What :func:`export` wrote."""

    path: Path
    layout: str
    engines: tuple[str, ...]
    """Engines that load the directory as it is."""
    refused: dict[str, str]
    """Engines that do not, with the reason and the nearest thing that works."""
    dtype: str
    files: tuple[str, ...]
    parameters: int
    comparisons: tuple[Comparison, ...]
    launch: dict[str, str]
    """How to start each engine with it."""
    notes: tuple[str, ...] = ()
    quantization: str | None = None
    """``quant_algo``, if the drafter was quantised."""

    @property
    def worst_difference(self) -> float:
        """Largest relative difference between the drafter and the independent reading of the files."""
        return max(c.worst for c in self.comparisons)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        return {
            "path": str(self.path),
            "layout": self.layout,
            "engines": list(self.engines),
            "refused": dict(self.refused),
            "dtype": self.dtype,
            "quantization": self.quantization,
            "files": list(self.files),
            "parameters": self.parameters,
            "worst_difference": self.worst_difference,
            "launch": dict(self.launch),
            "notes": list(self.notes),
        }

    def show(self, console: Console | None = None) -> None:
        """Print what was written and how to serve it."""
        console = console or stderr_console()
        table = Table(
            "", "", title=f"exported to {self.path}", title_justify="left", show_edge=False, show_header=False
        )
        types = self.dtype if self.quantization is None else f"{self.quantization} and {self.dtype}"
        table.add_row("layout", f"{self.layout}, {self.parameters:,} parameters, {types}")
        table.add_row("proven", f"block logits read back from the files differ by {self.worst_difference:.1e} at most")
        for name in self.engines:
            table.add_row(name, "loads it as it is")
        for name, reason in self.refused.items():
            table.add_row(name, f"[yellow]no:[/] {reason}")
        for note in self.notes:
            table.add_row("note", note)
        console.print(table)
        for name, line in self.launch.items():
            console.print(f"[bold]{name}[/]\n{line}", highlight=False, soft_wrap=True)


def export(
    model_or_checkpoint: nn.Module | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    engines: str | Sequence[str] | None = None,
    layout: str | None = None,
    dtype: str | torch.dtype | None = None,
    overwrite: bool = False,
    scheduler: str | os.PathLike[str] | None = None,
    fold_temperature: bool = False,
    gguf: str | os.PathLike[str] | None = None,
    max_shard_bytes: int | None = None,
    quantization_report: Mapping[str, Any] | None = None,
    quiet: bool = False,
) -> ExportReport:
    """Write a drafter as a directory that engines load.

    Args:
        model_or_checkpoint: a model with a drafter, or a checkpoint directory (of :func:`modelopt_spec.save`
            or of a run).
        out: the directory to write. It appears complete or not at all.
        engines: engine, or engines that must all load it (``vllm``, ``sglang``, ``tensorrt_llm``, ``llama.cpp``);
            None writes for as many as serve this drafter and reports the others.
        layout: published format to write; None takes the one that the engines read, and gives an anchor-first drafter
            without a head a head of zeros, which engines need (llama.cpp alone serves it as it is).
        dtype: type of the written weights; None keeps theirs, or takes the only one that a named engine serves.
        overwrite: replace a directory that is not empty.
        scheduler: a ``scheduler.json`` of this drafter; it and its files for the engines are written too. Default: the
            one that lies in the checkpoint directory, if any.
        fold_temperature: divide the confidence layer by the shared temperature of ``scheduler``, for vLLM, which reads
            no calibration. The files for other engines are made for the divided layer.
        gguf: the target's GGUF file; a ``draft.gguf`` for llama.cpp is written too.
        max_shard_bytes: split the weights into files of about this size; None writes 5 GiB at most a file.
        quantization_report: what quantising did to a drafter that was quantised in memory, for the card.
        quiet: do not print the report.

    Raises:
        UnsupportedError: an engine that was named does not serve this drafter, or two cannot share one directory.
        CheckpointError: ``out`` is not free, or what was written does not reproduce the drafter.
    """
    out = check_path("out", out, "the directory to write")
    if not isinstance(model_or_checkpoint, nn.Module):
        model_or_checkpoint = check_path(
            "model_or_checkpoint", model_or_checkpoint, "a model or a checkpoint directory"
        )
    read = () if isinstance(model_or_checkpoint, nn.Module) else (model_or_checkpoint,)
    check_free(out, overwrite=overwrite, marks=DRAFTER_FILES, keep=read, export=True)
    engines = [engines] if isinstance(engines, str) else engines
    draft, target, provenance, source = draft_of(model_or_checkpoint)
    facts = TargetFacts.from_card(target)
    wanted = _needed_dtype(draft.config, engines) if dtype is None else parse_dtype(dtype)
    parameters = None
    beside = None if isinstance(model_or_checkpoint, nn.Module) else Path(model_or_checkpoint) / SCHEDULER_FILE
    if scheduler is None and beside is not None and beside.is_file():
        scheduler = beside
    if scheduler is not None:
        gamma = drafts_of(draft.config)
        parameters, tensors = shippable(scheduler, draft.tensors, gamma=gamma, fold=fold_temperature)
        draft = replace(draft, tensors=tensors)
    elif fold_temperature:
        raise ConfigError("fold_temperature needs a scheduler file: its shared temperature is what is folded")
    if wanted is not None:
        draft = cast_draft(draft, wanted)
    _check_mask(draft)
    zero_head = layout is None and needs_zero_head(draft.config) and not _serve_without_head(draft.config, engines)
    if zero_head:
        draft = with_zero_head(draft)
    algorithm = draft.packed.algorithm if draft.packed is not None else None
    plan = plan_export(draft.config, engines, layout=layout, dtype=draft.dtype, target=facts, quantization=algorithm)
    with atomic_directory(out, overwrite) as directory:
        files = write_draft(draft, plan, directory, target=facts, max_shard_bytes=max_shard_bytes)
        comparisons = prove(draft, directory)
        notes = list(plan.notes)
        if zero_head:
            notes.append("written with a head of zeros, which changes nothing: engines build a head in any case")
        launch = plan.launch(facts.name or "TARGET", str(out))
        if parameters is not None:
            shipped = ship(
                parameters,
                draft.tensors,
                directory,
                launch=launch,
                target=facts.name or "TARGET",
                out=str(out),
                folded=fold_temperature,
            )
            files, launch, notes = [*files, *shipped.files], shipped.launch, [*notes, *shipped.notes]
        if gguf is not None:
            files.append(write_gguf(directory, gguf, directory / GGUF_FILE, target=facts).name)
        card = build_card(
            draft.config,
            layout=plan.layout.name,
            engines={"load": list(plan.engines), "refused": dict(plan.refused)},
            dtype=str(draft.dtype).removeprefix("torch."),
            target=target,
            fingerprint=store.fingerprint_of(draft.tensors),
            source=source,
            provenance=provenance,
        )
        if draft.packed is not None:
            card["quantization"] = {
                **quantisation_of(quantization_config(draft.packed)[0]),
                "layers": list(draft.packed.layers),
                **(quantization_report or {}),
            }
        card["files"] = {name: sha256_of(directory / name) for name in files}
        card["proof"] = {"contexts": [c.context for c in comparisons], "worst": max(c.worst for c in comparisons)}
        write_json(directory / CARD, card)
        _preflight(directory, model_or_checkpoint if isinstance(model_or_checkpoint, nn.Module) else None)
    path = Path(out)
    report = ExportReport(
        path=path,
        layout=plan.layout.name,
        engines=plan.engines,
        refused=plan.refused,
        dtype=card["dtype"],
        files=(*files, CARD),
        parameters=sum(t.numel() for t in draft.tensors.values() if t.is_floating_point()),
        comparisons=comparisons,
        launch=launch,
        notes=tuple(notes),
        quantization=algorithm,
    )
    if not quiet:
        report.show()
    return report


def write_draft(
    draft: Draft,
    plan: ExportPlan,
    directory: Path,
    *,
    target: TargetFacts = NO_TARGET,
    max_shard_bytes: int | None = None,
) -> list[str]:
    """Write ``config.json`` and the weights of a draft in a plan's layout; returns the file names."""
    limits = {} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}
    dtype = str(draft.dtype).removeprefix("torch.")
    config = {**plan.layout.write_config(draft.config, target=target), "dtype": dtype, "torch_dtype": dtype}
    files = write_tensors(plan.layout.write_packed(draft), directory, **limits)
    if draft.packed is not None:
        config["quantization_config"], whole = quantization_config(draft.packed)
        write_json(directory / QUANT_FILE, whole)
        files.append(QUANT_FILE)
    write_json(directory / "config.json", config)
    return ["config.json", *files]


def prove(draft: Draft, directory: Path, *, contexts: Sequence[int] = CONTEXTS) -> tuple[Comparison, ...]:
    """Read a written directory with the independent reader and compare blocks with the drafter, in float32.

    Raises:
        CheckpointError: they differ by more than :data:`TOLERANCE`.
    """
    config = draft.config
    width = config.target_hidden_size or 0
    stand_in = StandIn(config.backbone.hidden_size or 0, config.vocab_size or 0)
    drafter: Drafter = rebuild(draft)
    reader = IndependentDraft.open(directory)
    generator = torch.Generator().manual_seed(1)
    results = []
    for context in contexts:
        taps = torch.randn(context, len(config.target_layer_ids or ()) * width, generator=generator)
        anchor = context % (config.vocab_size or 1)
        comparison = compare_block(
            drafter,
            reader,
            taps,
            anchor,
            stand_in.embed,
            stand_in.logits,
            window_rule=config.backbone.window_rule,
        )
        if not comparison.worst <= TOLERANCE:
            raise CheckpointError(
                f"what was written does not reproduce the drafter: at {context} context positions the files give "
                f"hidden states off by {comparison.hidden:.2g}, logits by {comparison.logits:.2g}, confidences by "
                f"{comparison.confidence:.2g} (relative). Nothing was kept; report this as a bug"
            )
        results.append(comparison)
    return tuple(results)


def draft_of(source: nn.Module | str | os.PathLike[str]) -> tuple[Draft, dict[str, Any], dict[str, Any], str]:
    """The draft, its target's identity, its provenance and where it came from."""
    if isinstance(source, nn.Module):
        drafter = getattr(source, "drafter", None)
        if not isinstance(drafter, Drafter):
            raise CheckpointError(f"this {type(source).__name__} has no drafter: call modelopt_spec.convert first")
        tensors = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
        packed = None
        if is_quantised(drafter):
            packed = pack(drafter)
            tensors = {name: tensors[name] for name in expected_shapes(drafter.config)} | float_weights(packed)
        draft = Draft(drafter.config, tensors, packed, shared_modules(source, drafter.config))
        return draft, target_identity(source), {}, "a model in memory"
    root = Path(source)
    description = store.read_description(root)
    tensors = store.read_weights(root, description)
    target = description.get("target_identity") or {"name": str(description.get("target", ""))}
    config = store.config_of(description)
    shared = shared_modules(recorded_target(root), config)
    return Draft(config, tensors, shared=shared), target, provenance_of(root), str(root)


def _needed_dtype(config: DrafterConfig, engines: Sequence[str] | None) -> torch.dtype | None:
    """The one type that a named engine serves this drafter in; None keeps the weights' own."""
    wanted = (get_engine(name).only_dtype(config) for name in engines or ())
    return next((dtype for dtype in wanted if dtype is not None), None)


def _serve_without_head(config: DrafterConfig, engines: Sequence[str] | None) -> bool:
    """Whether all named engines take a drafter without a head as it is."""
    return bool(engines) and all(get_engine(name).serves_without_head(config) for name in engines or ())


def cast_draft(draft: Draft, dtype: torch.dtype) -> Draft:
    """The draft in another type; what must stay float32 and what is packed keeps its own."""
    kept = kept_in_float32(draft.config) if dtype in (torch.bfloat16, torch.float16) else frozenset()
    kept |= draft.packed_names
    tensors = {n: t.to(dtype) if t.is_floating_point() and n not in kept else t for n, t in draft.tensors.items()}
    return replace(draft, tensors=tensors)


def _check_mask(draft: Draft) -> None:
    """Refuse a draft whose mask id is not known: engines need it."""
    if draft.config.mask_token_id is None:
        raise CheckpointError(
            "mask_token_id is not set, and engines need it: call drafter.set_mask_token(tokenizer), or convert with one"
        )


def _preflight(directory: Path, target: nn.Module | None) -> None:
    """Refuse to let a directory appear that would be served otherwise than it was trained."""
    from modelopt_spec.checkpoints.preflight import check

    whole = target if hasattr(target, "get_input_embeddings") else None
    report = check(directory, whole)
    if not report.ok:
        reasons = "; ".join(f"{fact.name}: {fact.note}" for fact in report.facts if fact.bad)
        raise CheckpointError(f"the preflight of what was written fails, nothing was kept. {reasons}")
