"""`check`: hold a draft directory against its training and against what engines will do with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.card import CARD, read_card, trained_config
from modelopt_spec.checkpoints.engines import ENGINES, Engine, get_engine
from modelopt_spec.checkpoints.engines.base import Directory, View
from modelopt_spec.checkpoints.layouts import Layout, get_layout, recognise
from modelopt_spec.checkpoints.packing import logical_entries
from modelopt_spec.checkpoints.preflight.content import content_facts, embedding_warnings, target_fact
from modelopt_spec.checkpoints.preflight.dynamic import block_facts
from modelopt_spec.checkpoints.preflight.facts import DEPENDS, FACTS, FIELD_FACTS, agree, facts_of
from modelopt_spec.checkpoints.preflight.quantisation import quantisation_facts
from modelopt_spec.checkpoints.preflight.report import Fact, Report
from modelopt_spec.checkpoints.safe_read import read_json, tensor_entries
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.errors import CheckpointError, SpecError

__all__ = ["check"]


@dataclass
class _Written:
    """What the files say, in this package's words."""

    directory: Directory
    layout: Layout | None
    config: DrafterConfig | None = None
    problems: dict[str, str] = field(default_factory=dict)
    """Fact -> what is wrong with the keys that say it."""


def check(
    directory: str | os.PathLike[str],
    target: nn.Module | None = None,
    engines: Sequence[str] | None = None,
    *,
    tokenizer: Any = None,
    trained: DrafterConfig | None = None,
    contexts: Sequence[int] | None = None,
    dynamic: bool = True,
    quiet: bool = True,
) -> Report:
    """Check that serving will do what training did.

    Args:
        directory: a draft directory. Its ``drafter_card.json`` says what training used; without one, and without
            ``trained``, only the files and the engines are compared.
        target: the target model; without it nothing that depends on it is checked.
        engines: engines to check for; None takes those that the card names, or all that can load the directory.
        tokenizer: the target's; tells whether text can hold the mask token.
        trained: what training used, instead of the card.
        contexts: context lengths of the blocks that are computed; None chooses short ones and one beyond the training
            length.
        dynamic: also compute blocks from the files alone and compare them with training's own pass.
        quiet: do not print the report.

    Returns:
        One fact after the other; ``report.exit_status`` is 1 if any differs.

    Raises:
        CheckpointError: files that are damaged or unsafe.
    """
    root = Path(directory)
    card = read_card(root)
    if trained is None and card is not None:
        trained = trained_config(card)
    facts_about_target = (
        TargetFacts.of(target) if target is not None else TargetFacts.from_card((card or {}).get("target", {}))
    )
    written = _read(root, str(card["layout"]) if card else None)
    report_facts: list[Fact] = []
    expected_layout = card["layout"] if card else None
    layout_name = written.layout.name if written.layout else "unknown"
    if "format" in written.problems or (expected_layout is not None and layout_name != expected_layout):
        note = written.problems.get(
            "format", "another layout than was exported: its keys and tensors would be read otherwise"
        )
        verdict = Fact("format", "", expected_layout, layout_name, None, "differs", note)
        return _finish(root, layout_name, (), [verdict], {}, ["everything else: settle the format first"], [], quiet)
    asked = engines if engines is not None else (card or {}).get("engines", {}).get("load")
    chosen = list(ENGINES.values()) if asked is None else [get_engine(name) for name in asked]
    views = {engine.name: _view(engine, written.directory, facts_about_target) for engine in chosen}
    not_served: dict[str, str] = {}
    if asked is None:
        not_served = {name: "; ".join(view.fails.values()) for name, view in views.items() if view.fails}
        views = {name: view for name, view in views.items() if name not in not_served}
    report_facts.append(Fact("format", "", expected_layout, layout_name, None, "same" if card else "unknown"))
    report_facts += [
        Fact("format", name, expected_layout, layout_name, None, "fails", view.fails["format"])
        for name, view in views.items()
        if "format" in view.fails
    ]
    report_facts += _compare(trained, written, views, facts_about_target)
    report_facts += quantisation_facts(root, written.directory, card, written.problems.get("quantisation"), views)
    report_facts += target_fact(trained, written.config, target)
    skipped = [] if card is not None or trained is not None else [f"training: {root} has no {CARD}"]
    static_ok = not any(fact.bad for fact in report_facts)
    config = trained or written.config
    if config is not None and static_ok and written.layout is not None:
        content, draft = content_facts(root, written.layout, config, written.directory, card, target, tokenizer)
        report_facts += content
        if any(fact.bad for fact in content):
            skipped.append("blocks: settle the facts above first")
        elif dynamic and draft is not None:
            computed, why_not = block_facts(root, draft, target, card, contexts)
            report_facts += computed
            skipped += why_not
    elif dynamic:
        skipped.append("weights and blocks: settle the facts above first")
    warnings = embedding_warnings(card, target)
    return _finish(root, layout_name, tuple(views), report_facts, not_served, skipped, warnings, quiet)


def _finish(
    root: Path,
    layout: str,
    engines: tuple[str, ...],
    facts: list[Fact],
    not_served: dict[str, str],
    skipped: list[str],
    warnings: list[str],
    quiet: bool,
) -> Report:
    order = {name: index for index, name in enumerate(FACTS)}
    ordered = tuple(sorted(facts, key=lambda fact: order[fact.name]))
    report = Report(root, layout, engines, ordered, not_served, tuple(skipped), tuple(warnings))
    if not quiet:
        report.show()
    return report


def _read(root: Path, expected: str | None) -> _Written:
    """The files in this package's words; mistakes in keys become problems of the fact that they are about."""
    config, entries = read_json(root / "config.json"), tensor_entries(root)
    files = tuple(sorted(path.name for path in root.iterdir()))
    problems: dict[str, str] = {}
    try:
        entries = logical_entries(config, entries)
    except CheckpointError as error:
        problems["quantisation"] = str(error)
    written = _Written(Directory(config, entries, files), None, problems=problems)
    try:
        written.layout = recognise(config, entries)
    except CheckpointError as error:
        written.problems["format"] = str(error)
        return written
    if expected is not None and written.layout.name != expected and expected in ("nemotron", "deepspec"):
        written.layout = get_layout(written.layout.name)
    keys = KeyReader(config, "config.json", allow_contradictions=True)
    try:
        written.config = written.layout.read_config(keys, entries)
    except SpecError as error:
        written.problems[FIELD_FACTS.get(keys.last, "format")] = str(error)
    for ours, message in keys.contradictions.items():
        written.problems.setdefault(FIELD_FACTS.get(ours, "format"), message)
    return written


def _view(engine: Engine, directory: Directory, target: TargetFacts) -> View:
    """What an engine does; keys that its own config class refuses make it fail on the format."""
    try:
        return engine.reads(directory, target)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return View(fails={"format": f"it cannot parse config.json: {str(error).splitlines()[0]}"})


def _compare(
    trained: DrafterConfig | None, written: _Written, views: dict[str, View], target: TargetFacts
) -> list[Fact]:
    """One fact for each engine, or one for the files where no engine has a say."""
    training = facts_of(trained, target) if trained is not None else {}
    files = facts_of(written.config) if written.config is not None else {}
    facts: list[Fact] = []
    for name in FACTS:
        if name in ("format", "target", "quantisation"):
            continue
        known = [view for view in views.values() if name in view.does or name in view.fails]
        if name not in training and name not in files and not known and name not in written.problems:
            continue
        mine, theirs = training.get(name), files.get(name)
        if mine is None and theirs is None and not known and name not in written.problems:
            continue
        speakers: list[tuple[str, View | None]] = [(n, v) for n, v in views.items() if v in known] or [("", None)]
        judged = [_judge(name, mine, theirs, engine, view, training, files, written) for engine, view in speakers]
        settled_first = DEPENDS.get(name, ())
        if name == "block size" and agree(mine, theirs):
            settled_first = ("anchor layout",)
        if any(fact.bad and fact.name in settled_first for fact in facts):
            continue
        facts += judged
    return facts


def _judge(
    name: str,
    mine: Any,
    theirs: Any,
    engine: str,
    view: View | None,
    training: dict[str, Any],
    files: dict[str, Any],
    written: _Written,
) -> Fact:
    """The verdict on one fact for one engine."""
    does = view.does.get(name) if view is not None else None
    if name == "window rule" and files.get("window", training.get("window")) is None:
        return Fact(name, engine, None, None, None, "same", "no window")
    if view is not None and name in view.fails:
        return Fact(name, engine, mine, theirs, does, "fails", view.fails[name])
    if name in written.problems:
        return Fact(name, engine, mine, theirs, does, "differs", written.problems[name])
    reference_known = name in training
    reference = mine if reference_known else theirs
    if name == "window rule":
        theirs = None
    elif reference_known and name in files and not agree(mine, theirs):
        return Fact(name, engine, mine, theirs, does, "differs", "the files say something else than training used")
    if view is None or name not in view.does:
        return Fact(name, engine, mine, theirs, does, "same" if reference_known else "unknown")
    if not (reference_known or name in files):
        return Fact(name, engine, mine, theirs, does, "unknown")
    if agree(reference, does):
        return Fact(name, engine, mine, theirs, does, "same")
    if name in view.harmless:
        return Fact(name, engine, mine, theirs, does, "harmless", view.harmless[name])
    if name == "window rule":
        return Fact(
            name, engine, mine, theirs, does, "differs", "equal only while the context is shorter than the window"
        )
    return Fact(name, engine, mine, theirs, does, "differs", "the engine will do something else")
