"""Attach a drafter to a model as a ModelOpt mode, and bring it back from ModelOpt's state.

ModelOpt resolves a mode by name over all of its registries and holds a `dflash` of its own, so ours are registered as
`mtsp_dflash`, `mtsp_dspark` and `mtsp_domino`; :func:`convert` translates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from modelopt_spec import noise
from modelopt_spec.config import MODES, DrafterConfig, SpecConfig
from modelopt_spec.drafter.drafter import Drafter, build_drafter
from modelopt_spec.errors import ConfigError, nearest
from modelopt_spec.resolve import resolve, show
from modelopt_spec.targets.base import Target, open_target

with noise.filtered():
    from modelopt.torch.opt.config import ModeloptBaseConfig
    from modelopt.torch.opt.conversion import ModeloptStateManager, apply_mode
    from modelopt.torch.opt.mode import ModeDescriptor, _ModeRegistryCls

__all__ = ["MODES", "attach", "convert", "undone_on_error"]

SpecModeRegistry = _ModeRegistryCls("modelopt_spec")

_PREFIX = "mtsp_"


def attach(model: Any, config: DrafterConfig, *, target: Target | None = None) -> Drafter | None:
    """Build the drafter of a resolved config, freeze everything else and set ``model.drafter``.

    A target that is spread over ranks says whether this one hosts the drafter (``target.hosts_drafter``; None is
    returned where it does not) and is told when the drafter is there (``target.attached``).
    """
    if getattr(model, "drafter", None) is not None:
        raise ConfigError(f"this {type(model).__name__} has a drafter already: convert a fresh model")
    target = target or open_target(model)
    attached: Callable[[Drafter | None], None] = getattr(target, "attached", lambda drafter: None)
    if not getattr(target, "hosts_drafter", True):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        attached(None)
        return None
    weight = model.get_input_embeddings().weight if hasattr(model, "get_input_embeddings") else next(model.parameters())
    drafter = build_drafter(config).to(device=weight.device, dtype=_float_dtype(model, weight.dtype))
    drafter.bind(target)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    attached(drafter)
    model.drafter = drafter
    drafter.train(model.training)
    return drafter


def _float_dtype(model: nn.Module, dtype: Any) -> Any:
    """The embedding's type, or the model's float type where the embedding is quantised."""
    return dtype if dtype.is_floating_point and dtype.itemsize >= 2 else model.dtype


def _convert(
    model: nn.Module, config: ModeloptBaseConfig, tokenizer: Any = None, quiet: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    assert isinstance(config, DrafterConfig)
    target = open_target(model)
    if config.vocab_size is not None and hasattr(target, "set_vocab_size"):
        target.set_vocab_size(config.vocab_size)
    resolved = resolve(MODES[config.algorithm](**config.model_dump()), target.shape, tokenizer)
    if hasattr(target, "verify"):
        target.verify()
    _initialise(attach(model, resolved, target=target), target)
    if not quiet and not (torch.distributed.is_initialized() and torch.distributed.get_rank()):
        show(config, resolved)
    return model, {"drafter": resolved.model_dump()}


def _initialise(drafter: Drafter | None, target: Target) -> None:
    """Let a new drafter's head start from the target's embedding where that is at hand."""
    matrix = target.embedding_matrix() if hasattr(target, "embedding_matrix") else None
    if drafter is not None and drafter.head is not None and matrix is not None:
        drafter.head.start_from(matrix)


def _restore(model: nn.Module, config: ModeloptBaseConfig, metadata: dict[str, Any]) -> nn.Module:
    attach(model, MODES[config["algorithm"]](**metadata["drafter"]))
    return model


def _update_for_save(model: nn.Module, config: ModeloptBaseConfig, metadata: dict[str, Any]) -> None:
    drafter = getattr(model, "drafter", None)
    if isinstance(drafter, Drafter):
        metadata["drafter"] = drafter.config.model_dump()


def _for_modelopt(config: type[DrafterConfig]) -> type[ModeloptBaseConfig]:
    """A mode's config as one of ModelOpt's own: ours are not derived from them, as that would import torch."""
    values = {"__module__": __name__, "__doc__": config.__doc__, "model_config": config.model_config}
    return type(config.__name__, (config, ModeloptBaseConfig), values)


_MODELOPT_CONFIGS = {name: _for_modelopt(config) for name, config in MODES.items()}


class _SpecMode(ModeDescriptor):
    """One of our modes; the subclasses differ in name and config only."""

    mode = ""

    @property
    def name(self) -> str:
        """Name in ModelOpt's registries."""
        return _PREFIX + self.mode

    @property
    def config_class(self) -> type[ModeloptBaseConfig]:
        """The mode's config."""
        return _MODELOPT_CONFIGS[self.mode]

    @property
    def convert(self) -> Callable:
        """Entry point that attaches a new drafter."""
        return _convert

    @property
    def restore(self) -> Callable:
        """Entry point that attaches the drafter of a saved state."""
        return _restore

    @property
    def update_for_save(self) -> Callable:
        """Entry point that records the drafter's config as it is now."""
        return _update_for_save


for _mode in MODES:
    SpecModeRegistry.register_mode(type(f"{_mode.title()}Mode", (_SpecMode,), {"mode": _mode}))


def _translate(mode: Any) -> list[tuple[str, dict[str, Any]]]:
    """Every form that ModelOpt takes -> [(registered name, config)]."""
    if isinstance(mode, dict):
        unknown = set(mode) - {"algorithm", "config"}
        if unknown or "algorithm" not in mode:
            raise ConfigError(f"mode {mode!r}: a dict needs the keys 'algorithm' and 'config'")
        mode = [(mode["algorithm"], mode.get("config") or {})]
    entries = mode if isinstance(mode, list) else [mode]
    translated = []
    for entry in entries:
        name, config = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
        if not isinstance(name, str) or not isinstance(config, Mapping | None):
            raise ConfigError(
                f"mode {entry!r}: give a name such as 'dspark', or ('dspark', config) with a dict of the drafter's keys"
            )
        name = name.removeprefix(_PREFIX)
        if name not in MODES:
            raise ConfigError(f"mode {name!r} is unknown.{nearest(name, MODES)} Known modes: {', '.join(MODES)}")
        values = config.model_dump() if isinstance(config, SpecConfig | ModeloptBaseConfig) else dict(config or {})
        MODES[name](**values)
        translated.append((_PREFIX + name, values))
    if len(translated) != 1:
        raise ConfigError(f"mode names {len(translated)} drafters: a model takes exactly one")
    return translated


def convert(model: nn.Module, mode: Any = "dspark", *, tokenizer: Any = None, quiet: bool = False) -> nn.Module:
    """Attach a drafter to a model, in place.

    Args:
        model: a Hugging Face causal language model (or a wrapper of one) or a megatron-core GPTModel. Its weights are
            frozen; its class, outputs and ``generate`` stay as they are.
        mode: ``"dspark"``, ``("dspark", config)``, a list with one of those, or ``{"algorithm": ..., "config": ...}``;
            config as in :class:`~modelopt_spec.config.DrafterConfig`. Whatever it leaves open follows the target.
        tokenizer: the target's; decides the mask token when the config does not name its id.
        quiet: do not print the table of settings.

    Returns:
        The same model; ``model.drafter`` is the new, trainable :class:`~modelopt_spec.drafter.drafter.Drafter`.

    Raises:
        ConfigError: unknown mode or key, a value that contradicts the target, or a drafter that is there already.
        UnsupportedError: a model that cannot be a target.
    """
    translated = _translate(mode)
    if getattr(model, "drafter", None) is not None:
        raise ConfigError(f"this {type(model).__name__} has a drafter already: convert a fresh model")
    open_target(model)
    with undone_on_error(model):
        return apply_mode(
            model,
            mode=translated,
            registry=SpecModeRegistry,
            mode_kwargs={"tokenizer": tokenizer, "quiet": quiet},
        )


@contextlib.contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Where the block fails, take off the drafter that it attached: the model is then as it was before."""
    had_drafter = getattr(model, "drafter", None) is not None
    key = ModeloptStateManager._state_key
    states = list(getattr(model, key)) if hasattr(model, key) else None
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        yield
    except BaseException:
        if not had_drafter:
            if getattr(model, "drafter", None) is not None:
                del model.drafter
            if states is not None:
                getattr(model, key)[:] = states
            elif hasattr(model, key):
                ModeloptStateManager.remove_state(model)
            for parameter in trainable:
                parameter.requires_grad_(True)
        raise
