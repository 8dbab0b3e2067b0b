"""Weights of Qwen3, Qwen3-MoE and Llama between Hugging Face's and Megatron-Core's names and shards.

One rank's Megatron weights from a Hugging Face checkpoint, and back from the shards of all ranks. The rules:

* ``linear_qkv``: for each query group [its q heads; k; v], groups split over the tensor-parallel ranks;
* ``linear_fc1``: [gate shard; up shard] on each rank; ``linear_proj`` and ``linear_fc2`` split their input dimension;
* embedding and output layer: rows, padded with zeros to Megatron's vocabulary, then split;
* norms and the router are whole on every rank; experts are split by expert over the expert-parallel ranks and inside an
  expert over the expert-tensor-parallel ranks;
* layer numbers are global. A stage of a pipeline holds its own layers only.

With a TransformerEngine spec the same tensors carry other names (:func:`transformer_engine_name`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelopt_spec.errors import CheckpointError, UnsupportedError
from modelopt_spec.targets.megatron_model import FAMILIES, GPTModel, moe_layer_pattern

__all__ = [
    "RankLayout",
    "SafetensorsDirectory",
    "gather_hf_weights",
    "hf_to_megatron",
    "load_hf_weights",
    "megatron_to_hf",
    "transformer_engine_name",
]


@dataclass(frozen=True)
class RankLayout:
    """Which part of the model one rank holds."""

    first_layer: int
    """Global 0-based index of the stage's first layer."""
    num_layers: int
    pre_process: bool
    """Whether the stage holds the embedding."""
    post_process: bool
    """Whether the stage holds the final norm and the output layer."""
    vocab_rows: int
    """Rows of the whole vocabulary, padding included."""
    tensor: tuple[int, int] = (0, 1)
    """Rank and size of the tensor-parallel group."""
    expert: tuple[int, int] = (0, 1)
    """Rank and size of the expert-parallel group."""
    expert_tensor: tuple[int, int] = (0, 1)
    """Rank and size of the group that splits each expert."""

    @classmethod
    def of(cls, model: GPTModel) -> RankLayout:
        """The layout of a built model under the initialised ``parallel_state``."""
        from megatron.core import parallel_state as mpu

        layers = model.decoder.layers
        return cls(
            first_layer=layers[0].layer_number - 1 if len(layers) else 0,
            num_layers=len(layers),
            pre_process=model.pre_process,
            post_process=model.post_process,
            vocab_rows=model.vocab_size,
            tensor=(mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()),
            expert=(mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()),
            expert_tensor=(mpu.get_expert_tensor_parallel_rank(), mpu.get_expert_tensor_parallel_world_size()),
        )


# ---- how one tensor is split and joined ------------------------------------------------------------------------------


def _chunk(weight: Tensor, part: tuple[int, int], dim: int) -> Tensor:
    rank, size = part
    if weight.shape[dim] % size:
        raise UnsupportedError(f"dimension {dim} of size {weight.shape[dim]} does not divide over {size} ranks")
    return weight.chunk(size, dim=dim)[rank]


class _Replicated:
    """Whole on every rank."""

    @staticmethod
    def split(parts: Sequence[Tensor], part: tuple[int, int]) -> Tensor:
        return parts[0]

    @staticmethod
    def join(shards: Sequence[Tensor]) -> list[Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class _Split:
    """Split along one dimension."""

    dim: int

    def split(self, parts: Sequence[Tensor], part: tuple[int, int]) -> Tensor:
        return _chunk(parts[0], part, self.dim)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards), dim=self.dim)]


class _GateUp:
    """Two projections of a gated MLP, stacked on each rank."""

    @staticmethod
    def split(parts: Sequence[Tensor], part: tuple[int, int]) -> Tensor:
        return torch.cat([_chunk(weight, part, 0) for weight in parts])

    @staticmethod
    def join(shards: Sequence[Tensor]) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]


@dataclass(frozen=True)
class _QueryKeyValue:
    """q, k and v interleaved by query group."""

    heads: int
    groups: int
    head_dim: int

    def split(self, parts: Sequence[Tensor], part: tuple[int, int]) -> Tensor:
        if self.groups % part[1]:
            raise UnsupportedError(
                f"num_key_value_heads {self.groups} does not divide over {part[1]} tensor-parallel ranks"
            )
        grouped = [weight.view(self.groups, -1, *weight.shape[1:]) for weight in parts]
        return _chunk(torch.cat(grouped, dim=1), part, 0).flatten(0, 1)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        whole = torch.cat(list(shards))
        queries = self.heads // self.groups * self.head_dim
        grouped = whole.view(self.groups, queries + 2 * self.head_dim, *whole.shape[1:])
        return [w.flatten(0, 1) for w in grouped.split([queries, self.head_dim, self.head_dim], dim=1)]


@dataclass(frozen=True)
class _Vocabulary:
    """Rows padded with zeros to Megatron's vocabulary, then split."""

    rows: int
    padded: int

    def split(self, parts: Sequence[Tensor], part: tuple[int, int]) -> Tensor:
        (weight,) = parts
        if weight.shape[0] != self.rows or self.padded < self.rows:
            raise CheckpointError(
                f"vocabulary of {weight.shape[0]} rows: the config says {self.rows}, "
                f"the Megatron model has {self.padded}"
            )
        padding = weight.new_zeros(self.padded - self.rows, weight.shape[1])
        return _chunk(torch.cat([weight, padding]), part, 0)

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat(list(shards))[: self.rows]]


@dataclass(frozen=True)
class _Weight:
    """One Megatron tensor: its name, the Hugging Face tensors that it holds and how they are laid out."""

    name: str
    sources: tuple[str, ...]
    rule: Any
    expert: int | None = None
    """Index of the expert, for weights that the expert-parallel ranks split."""


# ---- the map ---------------------------------------------------------------------------------------------------------


def _layer_weights(hf_config: Any, layer: int, is_moe: bool) -> Iterator[_Weight]:
    """The tensors of one decoder layer; ``layer`` is its global 0-based index, names start after ``layers.N.``."""
    here = f"model.layers.{layer}."
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads
    whole = _Replicated()
    yield _Weight("input_layernorm.weight", (f"{here}input_layernorm.weight",), whole)
    yield _Weight(
        "self_attention.linear_qkv.weight",
        tuple(f"{here}self_attn.{p}_proj.weight" for p in "qkv"),
        _QueryKeyValue(heads, groups, head_dim),
    )
    yield _Weight("self_attention.linear_proj.weight", (f"{here}self_attn.o_proj.weight",), _Split(1))
    if hf_config.model_type != "llama":
        for p in "qk":
            yield _Weight(f"self_attention.{p}_layernorm.weight", (f"{here}self_attn.{p}_norm.weight",), whole)
    yield _Weight("pre_mlp_layernorm.weight", (f"{here}post_attention_layernorm.weight",), whole)
    if not is_moe:
        gate_up = tuple(f"{here}mlp.{p}_proj.weight" for p in ("gate", "up"))
        yield _Weight("mlp.linear_fc1.weight", gate_up, _GateUp())
        yield _Weight("mlp.linear_fc2.weight", (f"{here}mlp.down_proj.weight",), _Split(1))
        return
    yield _Weight("mlp.router.weight", (f"{here}mlp.gate.weight",), whole)
    for j in range(hf_config.num_experts):
        gate_up = tuple(f"{here}mlp.experts.{j}.{p}_proj.weight" for p in ("gate", "up"))
        yield _Weight("mlp.experts.local_experts.{}.linear_fc1.weight", gate_up, _GateUp(), expert=j)
        down = (f"{here}mlp.experts.{j}.down_proj.weight",)
        yield _Weight("mlp.experts.local_experts.{}.linear_fc2.weight", down, _Split(1), expert=j)


def _rank_weights(hf_config: Any, layout: RankLayout) -> Iterator[_Weight]:
    """Every tensor of one rank, under its full Megatron name."""
    if hf_config.model_type not in FAMILIES:
        raise UnsupportedError(
            f"model_type {hf_config.model_type!r} has no Megatron weight map: {', '.join(FAMILIES)} have"
        )
    vocabulary = _Vocabulary(hf_config.vocab_size, layout.vocab_rows)
    tied = bool(hf_config.tie_word_embeddings)
    if layout.pre_process:
        yield _Weight("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), vocabulary)
    moe = moe_layer_pattern(hf_config) if hf_config.model_type == "qwen3_moe" else [0] * hf_config.num_hidden_layers
    experts_here = getattr(hf_config, "num_experts", 0) // layout.expert[1] if any(moe) else 0
    first_expert = layout.expert[0] * experts_here
    for local in range(layout.num_layers):
        layer = layout.first_layer + local
        for weight in _layer_weights(hf_config, layer, bool(moe[layer])):
            name = f"decoder.layers.{local}.{weight.name}"
            if weight.expert is None:
                yield _Weight(name, weight.sources, weight.rule)
            elif first_expert <= weight.expert < first_expert + experts_here:
                name = name.format(weight.expert - first_expert)
                yield _Weight(name, weight.sources, weight.rule, weight.expert)
    if layout.post_process:
        yield _Weight("decoder.final_layernorm.weight", ("model.norm.weight",), _Replicated())
        if not tied:
            yield _Weight("output_layer.weight", ("lm_head.weight",), vocabulary)
        elif not layout.pre_process:
            yield _Weight("output_layer.weight", ("model.embed_tokens.weight",), vocabulary)


def transformer_engine_name(name: str) -> str:
    """The name of a "local" tensor under a TransformerEngine layer spec (fused norms, grouped experts)."""
    if name.endswith("input_layernorm.weight"):
        return name.replace("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight")
    if ".mlp.experts.local_experts." in name:
        layer, rest = name.split("local_experts.")
        expert, linear, _ = rest.split(".")
        return f"{layer}{linear}.weight{expert}"
    return name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")


def _source(state_dict: Mapping[str, Tensor], name: str) -> Tensor:
    """One Hugging Face tensor; an expert's is cut from transformers 5's fused tensor where that is what is stored."""
    if name in state_dict:
        return state_dict[name]
    if ".mlp.experts." in name:
        prefix, rest = name.split(".mlp.experts.")
        expert, projection, _ = rest.split(".")
        fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
        key = f"{prefix}.mlp.experts.{fused}"
        if key in state_dict:
            weight = state_dict[key][int(expert)]
            return weight if fused == "down_proj" else weight.chunk(2)[int(projection == "up_proj")]
    raise CheckpointError(f"the Hugging Face weights have no {name!r}: is this a checkpoint of the given config?")


def hf_to_megatron(state_dict: Mapping[str, Tensor], hf_config: Any, layout: RankLayout) -> dict[str, Tensor]:
    """Megatron state dict of one rank (local-spec names) from a Hugging Face one.

    ``state_dict`` may be lazy (:class:`SafetensorsDirectory`): only what the rank needs is read. Fused experts of
    transformers 5 and one tensor for each expert (hub checkpoints) are both understood.
    """
    result = {}
    for weight in _rank_weights(hf_config, layout):
        part = layout.tensor if weight.expert is None else layout.expert_tensor
        result[weight.name] = weight.rule.split(
            [_source(state_dict, name) for name in weight.sources], part
        ).contiguous()
    return result


def megatron_to_hf(
    shards: Sequence[tuple[RankLayout, Mapping[str, Tensor]]], hf_config: Any, *, fused_experts: bool = True
) -> dict[str, Tensor]:
    """The Hugging Face state dict of all ranks' Megatron shards (replicas may be among them).

    Args:
        shards: layout and state dict (local-spec names) of each rank.
        hf_config: the target's transformers config.
        fused_experts: write transformers 5's ``gate_up_proj`` / ``down_proj`` of all experts instead of one each.
    """
    pieces: dict[tuple[str, ...], dict[int, Tensor]] = {}
    rules: dict[tuple[str, ...], tuple[Any, int]] = {}
    for layout, state_dict in shards:
        for weight in _rank_weights(hf_config, layout):
            rank, size = layout.tensor if weight.expert is None else layout.expert_tensor
            if weight.name not in state_dict:
                raise CheckpointError(f"the Megatron weights of tensor-parallel rank {rank} have no {weight.name!r}")
            pieces.setdefault(weight.sources, {})[rank] = state_dict[weight.name]
            rules[weight.sources] = (weight.rule, size)
    result: dict[str, Tensor] = {}
    for sources, by_rank in pieces.items():
        rule, size = rules[sources]
        if sorted(by_rank) != list(range(size)):
            raise CheckpointError(f"{sources[0]}: shards of ranks {sorted(by_rank)} of {size} were given")
        for name, tensor in zip(sources, rule.join([by_rank[r] for r in range(size)]), strict=True):
            result[name] = tensor.contiguous()
    if hf_config.tie_word_embeddings:
        result["lm_head.weight"] = result["model.embed_tokens.weight"]
    return (
        _fuse_experts(result, hf_config.num_experts) if fused_experts and hasattr(hf_config, "num_experts") else result
    )


def _fuse_experts(state_dict: dict[str, Tensor], num_experts: int) -> dict[str, Tensor]:
    """Stack the experts of each layer: ``experts.gate_up_proj`` [E, 2I, D] and ``experts.down_proj`` [E, D, I]."""
    result = {name: tensor for name, tensor in state_dict.items() if ".mlp.experts." not in name}
    layers = {name.split(".mlp.experts.")[0] for name in state_dict if ".mlp.experts." in name}
    for layer in sorted(layers):
        prefix = f"{layer}.mlp.experts."
        experts = [
            [state_dict[f"{prefix}{j}.{p}_proj.weight"] for p in ("gate", "up", "down")] for j in range(num_experts)
        ]
        result[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
        result[f"{prefix}down_proj"] = torch.stack([down for _, _, down in experts])
    return result


# ---- whole models ----------------------------------------------------------------------------------------------------


class SafetensorsDirectory(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory, read one at a time."""

    def __init__(self, directory: str | Path) -> None:
        from safetensors import safe_open

        self._files = {}
        for path in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))
        if not self._files:
            raise CheckpointError(f"{directory}: no *.safetensors file in this directory")

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _names(model: GPTModel, layout: RankLayout, hf_config: Any) -> dict[str, str]:
    """Name in the map -> name in the model, whichever layer spec it was built with."""
    present = {name for name, _ in model.named_parameters()}
    result = {}
    for weight in _rank_weights(hf_config, layout):
        candidates = (weight.name, transformer_engine_name(weight.name))
        found = next((name for name in candidates if name in present), None)
        if found is None:
            raise UnsupportedError(
                f"the Megatron model has no parameter {candidates[0]!r} (nor {candidates[1]!r}): its layer spec is not "
                "the local or the TransformerEngine one, or it was built for another config"
            )
        result[weight.name] = found
    return result


@torch.no_grad()
def load_hf_weights(model: GPTModel, weights: Mapping[str, Tensor] | str | Path, hf_config: Any) -> None:
    """Fill this rank's part of ``model`` from a Hugging Face state dict or directory, in the model's dtype."""
    state_dict = weights if isinstance(weights, Mapping) else SafetensorsDirectory(weights)
    layout = RankLayout.of(model)
    names = _names(model, layout, hf_config)
    parameters = dict(model.named_parameters())
    for name, tensor in hf_to_megatron(state_dict, hf_config, layout).items():
        parameter = parameters[names[name]]
        if parameter.shape != tensor.shape:
            raise CheckpointError(
                f"{names[name]}: shape {tuple(parameter.shape)} in the model, {tuple(tensor.shape)} given"
            )
        parameter.copy_(tensor)


@torch.no_grad()
def gather_hf_weights(model: GPTModel, hf_config: Any, *, fused_experts: bool = True) -> dict[str, Tensor] | None:
    """The whole model under Hugging Face names on rank 0, ``None`` elsewhere. Every rank must call it.

    All shards travel to rank 0 on the host: the model must fit there.
    """
    layout = RankLayout.of(model)
    parameters = dict(model.named_parameters())
    shard = {name: parameters[here].detach().cpu() for name, here in _names(model, layout, hf_config).items()}
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    torch.distributed.gather_object((layout, shard), gathered, dst=0)
    return None if gathered is None else megatron_to_hf(gathered, hf_config, fused_experts=fused_experts)
