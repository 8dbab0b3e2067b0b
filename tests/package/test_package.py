"""What somebody gets who installs the wheel: the recipes, the types, a light import and metadata that is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import modelopt_spec as mtsp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def python(code: str, *, path: Path = ROOT, cwd: Path | None = None) -> str:
    """The output of a fresh interpreter that finds the package in ``path``."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import json, sys\nbefore = set(sys.modules)\nimport modelopt_spec\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = {name.split(".")[0] for name in json.loads(python(code))}
    heavy = {"torch", "transformers", "modelopt", "numpy", "pydantic", "matplotlib", "datasets", "accelerate", "typer"}
    assert not loaded & heavy, f"import modelopt_spec loads {sorted(loaded & heavy)}"


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom modelopt_spec import cli, cli_run\n"
        "assert cli_run.run(cli.application(), ['--help'], debug=True) == 0\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert python(code).splitlines()[-1] == "False False"


def test_public_names_exist_and_are_documented() -> None:
    assert set(mtsp.__all__) <= set(dir(mtsp))
    for name in mtsp.__all__:
        thing = getattr(mtsp, name)
        if name != "__version__":
            assert thing.__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = mtsp.nothing


def test_version_is_semantic_and_the_same_everywhere() -> None:
    major, minor, patch = (int(part) for part in PROJECT["version"].split("."))
    assert (major, minor, patch) >= (0, 1, 0)
    assert mtsp.__version__ == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_supported_pythons_are_stated() -> None:
    stated = {name.rsplit(" :: ", 1)[1] for name in PROJECT["classifiers"] if "Python :: 3." in name}
    assert stated == {"3.11", "3.12", "3.13"}
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_deprecation_policy_is_written_down() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "## Deprecation" in text
    assert "DeprecationWarning" in text


def test_recipes_with_data_of_their_own_work_from_any_directory(tmp_path: Path) -> None:
    code = (
        "from modelopt_spec.training.recipe import builtin_recipes, load_recipe\n"
        "from modelopt_spec.data.sources import source_bytes\n"
        "for name in builtin_recipes():\n"
        "    recipe = load_recipe(name)\n"
        "    for source in (*recipe.data.train, *recipe.data.validation):\n"
        "        if source.path.startswith('builtin:'):\n"
        "            print(name, source_bytes(source))\n"
    )
    sizes = dict(line.split() for line in python(code, cwd=tmp_path).splitlines())
    assert {"dflash/smollm2_135m", "dspark/smollm2_135m", "domino/smollm2_135m"} <= set(sizes)
    assert set(sizes.values()) == {"1799604"}


@pytest.mark.slow
def test_wheel_installs_in_a_clean_place(tmp_path: Path) -> None:
    """Build the wheel, look into it, install it into an empty directory and use it from there."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True,
    )
    wheel = next(tmp_path.glob("modelopt_spec-*.whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {str(path.relative_to(ROOT)) for path in (ROOT / "modelopt_spec" / "recipes").rglob("*.yaml")}
    assert recipes
    assert recipes <= names
    assert "modelopt_spec/py.typed" in names
    assert {f"modelopt_spec/demo_data/{name}" for name in ("train.jsonl", "heldout.jsonl", "README.md")} <= names
    assert not {name for name in names if name.startswith(("tests/", "docs/", "examples/"))}
    metadata = zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("/METADATA"))).decode()
    assert "Requires-Python: <3.14,>=3.11" in metadata
    place = tmp_path / "place"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)], check=True
    )
    code = (
        "import modelopt_spec, sys\n"
        "from modelopt_spec.training.recipe import builtin_recipes, load_recipe\n"
        "print(modelopt_spec.__file__)\n"
        "print(len([load_recipe(name) for name in builtin_recipes()]))\n"
        "from modelopt_spec.data.config import SourceConfig\n"
        "from modelopt_spec.data.sources import source_files\n"
        "print(source_files(SourceConfig(path='builtin://demo/train.jsonl'))[0])\n"
        "from modelopt_spec import cli, cli_run\n"
        "sys.exit(cli_run.run(cli.application(), ['heads'], debug=True))\n"
    )
    lines = python(code, path=place, cwd=tmp_path).splitlines()
    assert lines[0].startswith(str(place))
    assert int(lines[1]) == len(recipes)
    assert lines[2].startswith(str(place))
    assert any("vanilla" in line for line in lines[3:])
