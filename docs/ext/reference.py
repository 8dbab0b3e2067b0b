"""Pages that are written from the code when the documentation is built: commands, recipes, settings, results.

`conf.py` calls :func:`write_all`; the tests call the same function, so a page that cannot be made fails both.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[2]
HEADS_RESULT = ROOT / "docs" / "results" / "heads" / "comparison.json"
STEP_RESULT = ROOT / "docs" / "results" / "speed" / "train_step.json"
PEERS = {"modelopt": "ModelOpt", "speculators": "speculators", "specforge": "SpecForge"}
"""Peers of `benchmarks/train_step.py`, as tables call them."""
DECODE_RESULT = ROOT / "docs" / "results" / "speed" / "decode.json"


def write_all(directory: Path) -> list[Path]:
    """Write every generated page; files that did not change keep their time, so that Sphinx does not rebuild."""
    directory.mkdir(parents=True, exist_ok=True)
    pages = {
        "cli.md": cli_page(),
        "recipes.md": recipes_page(),
        "settings.md": settings_page(),
        "heads_table.md": heads_table(HEADS_RESULT),
        "step_table.md": step_table(STEP_RESULT),
        "step_peers_table.md": step_table(STEP_RESULT.with_name("train_step_peers.json")),
        "step_kept_table.md": step_table(STEP_RESULT.with_name("train_step_kept_memory.json")),
        "decode_table.md": decode_table(DECODE_RESULT),
    }
    written = []
    for name, text in pages.items():
        path = directory / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


# ---- commands -------------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command of `mtsp` with its arguments and options, from typer."""
    import typer

    from modelopt_spec.cli import application

    group: Any = typer.main.get_command(application())
    context = group.make_context("mtsp", [], resilient_parsing=True)
    lines = ["Options of `mtsp` itself:", "", *_options(group), ""]
    for name in group.list_commands(context):
        command = group.commands[name]
        lines += _command(f"mtsp {name}", command)
        for part in getattr(command, "commands", {}).values():
            lines += _command(f"mtsp {name} {part.name}", part)
    return "\n".join(lines) + "\n"


def _command(path: str, command: Any) -> list[str]:
    anchor = path.replace(" ", "-")
    lines = [f"({anchor})=", f"## `{path}`", "", (command.help or "").strip().replace("``", "`"), ""]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if hasattr(command, "commands"):
        return lines
    usage = " ".join(_argument_name(p) for p in arguments)
    lines += ["```text", f"{path} {usage} [options]".replace("  ", " "), "```", ""]
    rows = [[f"`{_argument_name(p)}`", _clean(p.help), _default(p)] for p in arguments]
    if rows:
        lines += [*_table(["argument", "", "default"], rows), ""]
    return [*lines, *_options(command), ""]


def _options(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if parameter.param_type_name != "option" or getattr(parameter, "hidden", False):
            continue
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        rows.append(
            [names + (" (repeatable)" if parameter.multiple else ""), _clean(parameter.help), _default(parameter)]
        )
    return _table(["option", "", "default"], rows)


def _argument_name(parameter: Any) -> str:
    name = str(parameter.name).upper()
    name = f"{name} ..." if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _default(parameter: Any) -> str:
    value = parameter.default
    return "" if value in (None, False, (), []) or parameter.required else f"`{value}`"


# ---- settings -------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    """Every field of every section of a recipe, from the pydantic models."""
    from modelopt_spec import config
    from modelopt_spec.conversion import MODES
    from modelopt_spec.data.config import RegenerateConfig
    from modelopt_spec.training.recipe import Recipe

    lines: list[str] = []
    for name, field in Recipe.model_fields.items():
        model = _model(field.annotation)
        if name == "drafter":
            lines += [
                "## `drafter`",
                "",
                "`mode` (dflash, dspark or domino), `init_from` (a checkpoint or published draft to start from), "
                "`freeze` (parts that keep the weights they start with: backbone, head, confidence), and:",
                "",
                *_fields(config.DrafterConfig, "drafter", skip=("algorithm",)),
                *_mode_defaults(MODES),
            ]
        elif model is not None:
            lines += [f"## `{name}`", "", _first_paragraph(model), "", *_fields(model, name)]
            if name == "loss":
                lines += _loss_defaults()
            if name == "training":
                lines += ["Every field of `transformers.TrainingArguments` may stand here too.", ""]
    lines += ["## `mtsp data regenerate --set`", "", _first_paragraph(RegenerateConfig), ""]
    lines += _fields(RegenerateConfig, "")
    return "\n".join(lines) + "\n"


def _mode_defaults(modes: dict[str, Any]) -> list[str]:
    """What the modes set differently."""
    rows = []
    for name, mode in modes.items():
        made = mode()
        rows.append([f"`{name}`", f"`{made.head.type}`", "on" if made.confidence.enabled else "off"])
    return ["What `mode` changes:", "", *_table(["mode", "head.type", "confidence head"], rows), ""]


def _loss_defaults() -> list[str]:
    """The weights that a mode takes where the section leaves them open."""
    from modelopt_spec.training.recipe import LOSS_DEFAULTS

    rows = [
        [f"`{mode}`", ", ".join(f"`{term}: {value}`" for term, value in terms.items())]
        for mode, terms in LOSS_DEFAULTS.items()
    ]
    return ["Weights that the section leaves open follow `drafter.mode`:", "", *_table(["mode", "weights"], rows), ""]


def _fields(model: type[BaseModel], path: str, skip: Sequence[str] = ()) -> list[str]:
    """A table of a model's fields, then the tables of its nested models."""
    rows, nested = [], []
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        inner = _model(field.annotation)
        full = f"{path}.{name}" if path else name
        if inner is not None:
            nested.append((full, inner))
            continue
        rows.append([f"`{full}`", _type(field), _field_default(field), _clean(field.description)])
    lines = [*_table(["key", "type", "default", ""], rows), ""] if rows else []
    for full, inner in nested:
        lines += [f"### `{full}`", "", _first_paragraph(inner), "", *_fields(inner, full)]
    return lines


def _model(annotation: Any) -> type[BaseModel] | None:
    """The pydantic model of a field, if it is one (or one or None)."""
    options = [annotation, *typing.get_args(annotation)]
    found = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
    return found[0] if found and typing.get_origin(annotation) not in (list, tuple, dict) else None


def _type(field: FieldInfo) -> str:
    text = _type_name(field.annotation)
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if getattr(item, name, None) is not None
    ]
    return text + (f", {' and '.join(bounds)}" if bounds else "")


def _type_name(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if annotation is type(None):
        return "null"
    if origin is tuple or origin is list:
        inner = [part for part in parts if part is not Ellipsis]
        return f"list of {_type_name(inner[0])}" if inner else "list"
    if origin is dict or annotation is dict:
        return "mapping"
    if parts:
        return " or ".join(_type_name(part) for part in parts)
    if hasattr(annotation, "__members__"):
        return ", ".join(f"`{member.value}`" for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def _field_default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        value = field.default_factory()  # type: ignore[call-arg]
        return f"`{value}`" if value else ""
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "null"
    return f"`{getattr(field.default, 'value', field.default)}`" if field.default != "" else ""


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").strip().split("\n\n")[0].split()).replace("``", "`")


# ---- recipes --------------------------------------------------------------------------------------------------------


def recipes_page() -> str:
    """Every recipe that ships, from its YAML."""
    from modelopt_spec.training.recipe import builtin_recipes, load_recipe

    names = builtin_recipes()
    rows = []
    for name in names:
        recipe = load_recipe(name)
        head = recipe.drafter_config.get("head", {}).get("type") or {"domino": "gru", "dspark": "vanilla"}.get(
            recipe.mode
        )
        backbone = recipe.drafter_config.get("backbone", {})
        kind = backbone.get("type") or ("dense" if backbone.get("mlp") != "moe" else "moe")
        rows.append(
            [f"[`{name}`](#recipe-{_slug(name)})", f"`{recipe.model.name_or_path}`", recipe.mode, head or "none", kind]
        )
    lines = [*_table(["recipe", "target", "mode", "head", "backbone"], rows), ""]
    for name in names:
        lines += _recipe(name, load_recipe(name))
    return "\n".join(lines) + "\n"


def _recipe(name: str, recipe: Any) -> list[str]:
    path = ROOT / "modelopt_spec" / "recipes" / f"{name}.yaml"
    lines = [f"(recipe-{_slug(name)})=", f"## `{name}`", "", f"{recipe.metadata.description}.", ""]
    lines += [f"Numbers from: {recipe.metadata.source}.", ""]
    if recipe.metadata.expected:
        lines += [*_table(["expected", ""], [[k, _clean(str(v))] for k, v in recipe.metadata.expected.items()]), ""]
    lines += ["```bash", f"mtsp plan {name}", f"mtsp train {name} --dry-run", f"mtsp train {name}", "```", ""]
    return [*lines, *_yaml(path), ""]


def _yaml(path: Path) -> list[str]:
    return ["```yaml", path.read_text(encoding="utf-8").rstrip(), "```"]


def _slug(name: str) -> str:
    return name.replace("/", "-").replace("_", "-")


# ---- measured results -----------------------------------------------------------------------------------------------


def heads_table(path: Path) -> str:
    """The comparison of the heads, from the JSON that `mtsp compare` wrote; says so where there is none yet."""
    if not path.is_file():
        return _missing(path)
    from modelopt_spec.reports.comparison import COLUMNS, comparison_rows

    comparison = json.loads(path.read_text(encoding="utf-8"))
    rows = []
    for entry, row in zip(comparison["entries"], comparison_rows(comparison), strict=True):
        label, tau, span, by_seed, difference, microseconds, multiply_adds, state = row
        shares = entry["summary"]["conditional_acceptance"]
        slots = " ".join("-" if share is None else f"{share:.0%}" for share in shares)
        cost = [f"{microseconds:.0f}", f"{multiply_adds:,}", f"{state:,}"]
        rows.append([label, f"{tau:.3f}", span, by_seed, difference, slots, *cost])
    head = [*COLUMNS[:5], "acceptance by slot", *COLUMNS[5:]]
    first = comparison["entries"][0]["runs"][0]
    facts = (
        f"Measured by `mtsp compare` on {len(comparison['entries'])} entries and seeds "
        f"{', '.join(map(str, comparison['seeds']))}: {first['training']['steps']} steps each on the same rows, "
        f"tau on the same {first['evaluation']['pooled']['prompts']} held-out prompts in real rounds. "
        "Intervals and differences are bootstrapped over prompts (95%, paired), all seeds together; acceptance by slot "
        "is conditional. Head time is the median on the CPU that ran the comparison."
    )
    return "\n".join([*_table(head, rows), "", facts]) + "\n"


def step_table(path: Path) -> str:
    """Every size that `benchmarks/train_step.py` measured, from its JSON."""
    if not path.is_file():
        return _missing(path)
    measured = json.loads(path.read_text(encoding="utf-8"))
    heads = ["none", "vanilla", "gated", "rnn", "gru"]

    def place(result: dict[str, Any]) -> tuple[int, ...]:
        sizes = result["sizes"]
        return sizes["vocab"], sizes["seq"], sizes["anchors"], heads.index(result["head"])

    rows = []
    for result in sorted(measured["results"], key=place):
        sizes, over, peak = result["sizes"], result["over_floor"], result["peak_mib"]
        row = [result["head"], sizes["anchors"], sizes["seq"], sizes["vocab"], f"{result['floor_seconds']:.2f}"]
        system = result.get("system_over_floor", {}).get("ours")
        row += [f"{over['ours']:.2f}", "" if system is None else f"{system:.2f}", f"{peak['ours']:.0f}"]
        for name in PEERS:
            if name in over:
                row += [f"{over[name]:.2f}", f"{result['time_ratio'][name]:.2f}", f"{result['peak_ratio'][name]:.2f}"]
            else:
                row += ["", "", ""]
        rows.append(row)
    head = ["head", "N", "S", "V", "floor, s", "time / floor", "of it the system", "peak, MiB"]
    for title in PEERS.values():
        head += [f"{title} / floor", f"time / {title}", f"peak / {title}"]
    shown = [column for column in range(len(head)) if any(row[column] for row in rows)]
    table = _table([head[column] for column in shown], [[row[column] for column in shown] for row in rows])
    return "\n".join([*table, "", f"Medians of at least {measured['repeats']}."]) + "\n"


def decode_table(path: Path) -> str:
    """What one decoding round costs, from the JSON of `benchmarks/decode.py`."""
    if not path.is_file():
        return _missing(path)
    measured = json.loads(path.read_text(encoding="utf-8"))
    rounds, draft, speed = measured["round"], measured["draft"], measured["speed"]
    rows = [
        ["a round: the target's pass, ms", f"{rounds['target_ms']:.1f}"],
        ["a round: the draft's pass, ms", f"{rounds['draft_ms']:.1f}"],
        ["a round: everything else", f"{rounds['loop_ms']:.2f} ms, {rounds['loop_share']:.1%} of the round"],
        ["a draft pass: backbone and base logits, ms", f"{draft['parallel_ms']:.1f}"],
        [
            "a draft pass: the head, slot by slot",
            f"{draft['sequential_ms']:.2f} ms, {draft['sequential_share']:.1%} of the pass",
        ],
        ["tokens a second, `mtsp.generate`", f"{speed['tokens_per_second']:.1f}, accepted length {speed['tau']:.2f}"],
        ["tokens a second, `model.generate`", f"{speed['plain_tokens_per_second']:.1f}"],
    ]
    return "\n".join(_table(["median", ""], rows)) + "\n"


def _missing(path: Path) -> str:
    where = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"*Nothing is committed at `{where}` yet, so there are no numbers here.*\n"


# ---- pieces ---------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in cells)]


def _clean(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`")
