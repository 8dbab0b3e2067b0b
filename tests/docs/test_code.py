"""Every block of the pages that can run on a tiny model runs, in order; every `mtsp` line at least parses."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import modelopt_spec as mtsp
from modelopt_spec import cli, cli_run
from modelopt_spec.training.train import train
from tests.docs.pages import DOCS, ROOT, Block, blocks, commands, mtsp_lines, pages
from tests.training.tiny_run import make_target, recipe_values, write_chats, write_recipe

EXECUTED = [
    "quickstart.md",
    "concepts/drafter.md",
    "heads/none.md",
    "heads/vanilla.md",
    "heads/gated.md",
    "heads/rnn.md",
    "heads/gru.md",
    "heads/own.md",
    "migration/index.md",
    "migration/modelopt.md",
    "migration/deepspec.md",
    "migration/specforge.md",
    "migration/speculators.md",
    "troubleshooting.md",
]
"""Pages whose blocks are executed; a block that cannot run says why (`% not run: reason`)."""

SUBSTITUTES = {
    "dspark/smollm2_135m": "tiny.yaml",
    "builtin://demo/heldout.jsonl": "prompts.jsonl",
    "2000": "2",
    "--limit 8": "--limit 2 --max-new-tokens 8",
    '"What is speculative decoding?"': "What --max-new-tokens 8",
}
"""What stands for a real target, its prompts and a long run."""

NOT_OURS = ("git", "make", "pip", "cd", "torchrun", "vllm", "llama-server", "accelerate")
"""Programs whose lines are shown and not run."""

DRAFTS = {
    "draft-deepspec": ("dspark", "deepspec"),
    "draft-modelopt": ("dspark", "modelopt"),
    "draft-specforge": ("dspark", "specforge"),
    "draft-speculators": ("dspark", "speculators"),
    "draft": ("dspark", "deepspec"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages take for granted: a target, chats, prompts, a recipe, drafts of other projects."""
    root = tmp_path_factory.mktemp("docs")
    target = make_target(root / "path" / "to" / "target")
    rows = write_chats(root / "chats.jsonl", 24)
    shutil.copy(rows, root / "prompts.jsonl")
    values = recipe_values(target.relative_to(root), Path("chats.jsonl"), Path("runs/tiny"), max_steps=2)
    write_recipe(root / "tiny.yaml", values)
    recipe = next(block for block in blocks(DOCS / "quickstart.md") if block.language == "yaml")
    assert "max_steps: 2000" in recipe.code
    assert "rank: 256" in recipe.code
    text = recipe.code.replace("2000", "2").replace("rank: 256", "rank: 8").replace("num_anchors: 64", "num_anchors: 4")
    text = text.replace("validation_share: 0.05", "validation_share: 0.3")
    (root / "mine.yaml").write_text(text + "\n")
    (root / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "own_head.py", root / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        result = train("tiny.yaml", quiet=True)
        for name, (_, layout) in DRAFTS.items():
            mtsp.export(result.checkpoint, name, layout=layout, engines=[], quiet=True)
    return root


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", EXECUTED)
def test_page_runs(page: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "place"
    shutil.copytree(base, place)
    if page == "quickstart.md":
        shutil.rmtree(place / "draft")
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in blocks(DOCS / page):
        if block.not_run is None and block.language in ("python", "bash"):
            _run(block, names)
            ran += 1
    assert ran, f"{page} has no block that runs"


def _run(block: Block, names: dict[str, Any]) -> None:
    code = block.code
    for shown, used in SUBSTITUTES.items():
        code = code.replace(shown, used)
    where = f"{block.page.relative_to(DOCS)}:{block.line}"
    if block.language == "python":
        exec(compile(code, where, "exec"), names)
        return
    for line in commands(code):
        if line[0] == "mtsp":
            status = cli_run.run(cli.application(), line[1:], debug=True)
            assert status == 0, f"{where}: {' '.join(line)} exited with {status}"
        elif line[0] == "python":
            subprocess.run([sys.executable, *line[1:]], check=True, env={**_environment(), "PYTHONPATH": str(ROOT)})
        else:
            assert line[0] in NOT_OURS, f"{where}: nothing says how to run {line[0]!r}"


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.code, filename=f"{page}:{block.line}")


@pytest.mark.parametrize("page", [*pages(), ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_parse(page: Path) -> None:
    """Commands and options exist and required arguments are given, on every page."""
    group: Any = typer.main.get_command(cli.application())
    for line in mtsp_lines(page):
        arguments = line[1:]
        command, name = group, "mtsp"
        while arguments and hasattr(command, "commands"):
            if arguments[0].startswith("-"):
                break
            assert arguments[0] in command.commands, f"{page.name}: {' '.join(line)}: no such command"
            name, command = arguments[0], command.commands[arguments[0]]
            arguments = arguments[1:]
        if hasattr(command, "commands") or "--help" in arguments:
            continue
        try:
            command.make_context(name, list(arguments))
        except typer.BadParameter.__mro__[1] as error:
            raise AssertionError(f"{page.name}: {' '.join(line)}: {error}") from error


def test_the_checks_see_mistakes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\nmtsp evaluate x --promts y\n```\n\n% not run: no reason\n```python\nx = (\n```\n")
    assert mtsp_lines(page) == [["mtsp", "evaluate", "x", "--promts", "y"]]
    assert [block.not_run for block in blocks(page)] == [None, "no reason"]
    with pytest.raises(AssertionError, match="--promts"):
        test_command_lines_parse(page)
    with pytest.raises(SyntaxError):
        test_python_blocks_are_python(page)
