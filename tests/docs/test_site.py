"""The site builds without a warning, its links lead somewhere, and its reference pages say what the code says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, GENERATED, ROOT, links, pages, text_without_code

sys.path[:0] = [str(DOCS), str(DOCS / "ext")]
import figures  # noqa: E402
import reference  # noqa: E402

OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The generated pages by name."""
    directory = tmp_path_factory.mktemp("generated")
    return {path.name: path.read_text(encoding="utf-8") for path in reference.write_all(directory)}


def test_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "DSpark and Domino" in (tmp_path / "article.html").read_text(encoding="utf-8")
    assert "mtsp evaluate" in (tmp_path / "reference" / "cli.html").read_text(encoding="utf-8")


def anchors(page: Path) -> set[str]:
    """Fragments that a page offers: heading slugs (GitHub's rule, as MyST has it) and labels."""
    text = text_without_code(page)
    found = set(re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE))
    for line in page.read_text(encoding="utf-8").splitlines():
        heading = re.match(r"^#{1,4} (.+)$", line)
        if heading:
            words = re.sub(r"[^\w\- ]", "", heading[1].lower())
            found.add(words.replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", [*pages(), *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"^(https?|mailto):", target):
            continue
        path, _, fragment = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        if GENERATED in place.parts:
            assert place.stem in figures.FIGURES, f"{page.name}: no figure {target}"
            continue
        assert place.exists(), f"{page.name}: {target} does not exist"
        if fragment and place.suffix == ".md" and not fragment.startswith("recipe-"):
            assert fragment in anchors(place), f"{page.name}: {target}: no such heading"


def test_every_page_is_in_a_toctree() -> None:
    named: set[Path] = set()
    for page in pages():
        for block in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
            for line in block.splitlines():
                if line.strip() and not line.startswith(":"):
                    named |= {
                        path.resolve() for path in page.parent.glob(f"{line.strip()}.md".replace("**.md", "**/*.md"))
                    }
    missing = [page for page in pages() if page.resolve() not in named and page != DOCS / "index.md"]
    assert [str(page.relative_to(DOCS)) for page in missing] == []


def test_commands_page_has_every_option(made: dict[str, str]) -> None:
    import typer

    from modelopt_spec.cli import application

    group: Any = typer.main.get_command(application())
    page = made["cli.md"]
    for name, command in group.commands.items():
        for part in getattr(command, "commands", {name: command}).values():
            assert f"mtsp {name}" in page
            section = page.split(f"## `mtsp {name}" + (f" {part.name}`" if part is not command else "`"))[1]
            for parameter in part.params:
                if parameter.param_type_name == "option":
                    assert parameter.opts[0] in section.split("\n## ")[0]


def test_settings_page_has_every_field(made: dict[str, str]) -> None:
    from modelopt_spec.config import BackboneConfig, HeadConfig, LossConfig
    from modelopt_spec.data.config import DataConfig
    from modelopt_spec.training.recipe import TrainingSection

    sections = {
        "drafter.backbone": BackboneConfig,
        "drafter.head": HeadConfig,
        "loss": LossConfig,
        "data": DataConfig,
        "training": TrainingSection,
    }
    for path, model in sections.items():
        for name in model.model_fields:
            assert f"`{path}.{name}" in made["settings.md"], f"{path}.{name}"


def test_recipes_page_has_every_recipe(made: dict[str, str]) -> None:
    from modelopt_spec.training.recipe import builtin_recipes

    for name in builtin_recipes():
        assert f"## `{name}`" in made["recipes.md"]


def test_heads_table_shows_the_file(tmp_path: Path) -> None:
    stats = {"tau": 1.5, "prompts": 3}
    summary = {
        "tau": 1.5,
        "interval": [1.4, 1.6],
        "conditional_acceptance": [0.25, None],
        "difference": 0.25,
        "difference_interval": [0.125, 0.375],
    }
    run = {"evaluation": {"pooled": stats}, "training": {"steps": 7, "seconds": 1.0, "curve": []}, "seed": 0}
    entry = {
        "name": "a",
        "recipe": "dspark/x",
        "overrides": ["drafter.head.type=rnn"],
        "runs": [run],
        "summary": summary,
        "head_cost": {"microseconds": 12.0, "multiply_adds": 3456, "state_floats": 8},
    }
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps({"entries": [entry], "seeds": [0]}))
    table = reference.heads_table(path)
    for shown in (
        "dspark (rnn)",
        "1.500",
        "1.400 to 1.600",
        "+0.250 (+0.125 to +0.375)",
        "25% -",
        "3,456",
        "7 steps",
        "3 held-out prompts",
    ):
        assert shown in table
    assert "no numbers here" in reference.heads_table(tmp_path / "none.json")


def test_figures_do_not_change_from_run_to_run(tmp_path: Path) -> None:
    first, second = figures.draw_all(tmp_path / "a"), figures.draw_all(tmp_path / "b")
    assert [path.name for path in first] == [f"{name}.svg" for name in figures.FIGURES]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
