"""What a layout is: the names and keys of one published draft format, in both directions. No tensors are computed here.

A layout translates between a :class:`Draft` (our config, weights under our state dict names) and the keys of a
``config.json`` plus the tensor names of a safetensors file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelopt_spec.checkpoints.account import Entry, KeyReader
from modelopt_spec.checkpoints.packing import Packed
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import DrafterConfig
from modelopt_spec.drafter.drafter import build_drafter
from modelopt_spec.errors import CheckpointError, UnsupportedError, nearest

__all__ = ["NO_TARGET", "SHARED", "Draft", "Layout", "expected_shapes", "kept_in_float32", "only_dense"]

NO_TARGET = TargetFacts()
"""A target that scales nothing and has no name."""
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's modules, which a draft may carry a copy of."""


@dataclass(frozen=True)
class Draft:
    """A drafter as data: what every layout reads to and writes from."""

    config: DrafterConfig
    """Fully resolved, as far as a file can say it."""
    tensors: Mapping[str, Tensor]
    """Weights under the names of the drafter's state dict; quantised ones as the float32 that they stand for."""
    packed: Packed | None = None
    """How the quantised ones are stored."""
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    """The target's modules under their names of :data:`SHARED`, for a layout that carries them."""

    @property
    def packed_names(self) -> frozenset[str]:
        """Our names of the quantised weights."""
        return frozenset() if self.packed is None else frozenset(f"{name}.weight" for name in self.packed.layers)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights that are not quantised."""
        packed = self.packed_names
        return next(t.dtype for name, t in self.tensors.items() if t.is_floating_point() and name not in packed)


class Layout(ABC):
    """Names and keys of one published format."""

    name: ClassVar[str]
    """As on the command line."""
    title: ClassVar[str]
    """For tables."""

    @abstractmethod
    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """Whether a directory's content is of this layout."""

    @abstractmethod
    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Our config from the file's keys (and tensor shapes, where a key is missing)."""

    @abstractmethod
    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """The keys of ``config.json`` without ``dtype``."""

    def refuses(self, config: DrafterConfig) -> str | None:
        """Why a drafter cannot be written in this layout, with the nearest thing that can; None if it can."""
        return None

    def file_name(self, ours: str) -> str:
        """The file's name of one of our tensors."""
        return ours

    def our_name(self, name: str) -> str:
        """Our name of one of the file's tensors."""
        return name

    def known_extra(self, name: str) -> str | None:
        """Why a tensor of the file that the drafter has no place for may stand there; None if it may not."""
        return "the target's own module is used" if name in SHARED else None

    def own_type(self, name: str) -> bool:
        """Whether a tensor of the file has the draft's float type; false for tables and what stays float32."""
        return name != "d2t"

    def after_read(self, draft: Draft) -> Draft:
        """Values that mean something else in the file than here (offsets, for example); names are done already."""
        return draft

    def check(self, config: DrafterConfig) -> None:
        """Raise what :meth:`refuses` says."""
        reason = self.refuses(config)
        if reason:
            raise UnsupportedError(f"layout {self.name!r}: {reason}")

    def write_tensors(self, draft: Draft) -> dict[str, Tensor]:
        """The file's tensors, contiguous."""
        return {self.file_name(name): tensor.detach().contiguous() for name, tensor in draft.tensors.items()}

    def write_packed(self, draft: Draft) -> dict[str, Tensor]:
        """The file's tensors, quantised weights as they are stored with their scales beside them."""
        tensors = self.write_tensors(draft)
        for name, parts in draft.packed.layers.items() if draft.packed is not None else ():
            stem = self.file_name(f"{name}.weight").removesuffix("weight")
            tensors |= {f"{stem}{part}": tensor.contiguous() for part, tensor in parts.items()}
        return tensors

    def match(
        self,
        config: DrafterConfig,
        entries: Mapping[str, TensorEntry],
        *,
        ignore_unknown: bool = False,
        overruled: list[str] | None = None,
    ) -> tuple[dict[str, str], list[Entry]]:
        """Pair our tensor names with the file's, and account for every tensor of the file.

        Returns:
            {our name: file name} and one entry for each tensor of the file.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of the wrong shape.
        """
        shapes = expected_shapes(config)
        pairs: dict[str, str] = {}
        account: list[Entry] = []
        unknown: list[str] = []
        for name, entry in entries.items():
            ours = self.our_name(name)
            if ours in shapes:
                if tuple(entry.shape) != shapes[ours]:
                    raise CheckpointError(
                        f"tensor {name!r} has shape {list(entry.shape)}, but its config asks for {list(shapes[ours])}"
                    )
                pairs[ours] = name
                account.append(Entry(name, "used" if ours == name else "renamed", ours, list(entry.shape)))
            elif (reason := self.known_extra(name)) is not None:
                account.append(Entry(name, "ignored", reason, list(entry.shape)))
            else:
                unknown.append(name)
                account.append(Entry(name, "ignored", "not a tensor of this drafter", list(entry.shape)))
        missing = sorted(set(shapes) - set(pairs))
        if missing:
            named = ", ".join(self.file_name(name) for name in missing[:8])
            raise CheckpointError(
                f"layout {self.name!r}: the file lacks {len(missing)} tensors that its config asks for: {named}"
            )
        if unknown:
            message = (
                f"layout {self.name!r}: {len(unknown)} tensors belong to no part of the drafter that the config "
                f"describes: {', '.join(unknown[:8])}.{nearest(unknown[0], [self.file_name(n) for n in shapes])}"
            )
            if not ignore_unknown:
                raise CheckpointError(
                    f"{message} A head that the config does not mention would be lost; pass ignore_unknown to drop them"
                )
            if overruled is not None:
                overruled.append(message)
        return pairs, account


def kept_in_float32(config: DrafterConfig) -> frozenset[str]:
    """Our names of the weights that stay float32 when the drafter is cast to a 16-bit type."""
    with torch.device("meta"):
        drafter = build_drafter(config).bfloat16()
    return frozenset(name for name, tensor in drafter.state_dict().items() if tensor.dtype == torch.float32)


def only_dense(config: DrafterConfig) -> str | None:
    """Why a layout of Qwen3-style layers cannot hold a drafter's backbone; None if it can."""
    backbone = config.backbone
    if backbone.layer_style != "qwen3":
        return f"holds Qwen3-style layers only, not {backbone.layer_style}; use layout 'deepspec_gemma4'"
    if backbone.type != "dense":
        return f"holds dense backbones only, not {backbone.type}; use layout 'deepseek_v4'"
    if backbone.residual == "plain" and backbone.mlp == "dense":
        return None
    parts = f"residual {backbone.residual}, mlp {backbone.mlp}"
    return (
        f"holds plain layers only, and no engine has Qwen3-style layers with {parts}; serve it with "
        "modelopt_spec.generate, or train with backbone.type moe_mhc"
    )


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a resolved config's drafter, from a copy without memory."""
    with torch.device("meta"):
        drafter = build_drafter(config)
    return {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
