"""A megatron-core ``GPTModel`` behind the Target interface, under tensor, sequence, pipeline and expert parallelism.

Legend: B batch, S sequence, D hidden, V vocabulary, T taps, L layers.

* Taps are caught by hooks on the transformer layers and ordered by layer number, never by arrival.
* Sequence parallelism: taps and the last hidden state are gathered along the sequence.
* Pipeline parallelism: each stage sends [hidden; taps so far] to the next one in a single tensor, so that the taps
  arrive at the last stage in step with the hidden states, whatever the schedule. The drafter lives on the last stage.
* Embedding and output layer are called as the modules that they are. The embedding of an untied model is on the first
  stage, so the last one keeps a frozen copy of its shard (:meth:`MegatronTarget.sync_embedding`).
* Megatron pads the vocabulary. The padded rows have no token: they are cut off before anything reads the logits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelopt_spec.config import DrafterConfig
from modelopt_spec.conventions import EMBEDDING_TAP
from modelopt_spec.errors import ConfigError, DataError, UnsupportedError
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.base import TargetShape
from modelopt_spec.targets.megatron_checkpoint import describe_shards
from modelopt_spec.targets.megatron_model import GPTModel
from modelopt_spec.targets.megatron_shape import known_vocab_size, read_shape
from modelopt_spec.targets.megatron_vocab import VocabShard, gather_vocabulary, shard_drafter

try:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import VocabParallelEmbedding
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
    )
except ImportError as error:  # pragma: no cover - megatron_model has said so already
    raise ImportError(str(error)) from error

__all__ = ["MegatronTarget", "drafter_config"]


def _refuse(model: GPTModel) -> None:
    """Raise for models that the adapter would read wrongly."""
    config = model.config
    if config.context_parallel_size > 1:
        raise UnsupportedError(
            f"context_parallel_size is {config.context_parallel_size}: a block's context would be spread over ranks; "
            "use tensor, sequence, pipeline, expert and data parallelism for Megatron targets"
        )
    if (config.virtual_pipeline_model_parallel_size or 1) > 1 or getattr(model, "vp_stage", None):
        raise UnsupportedError(
            f"virtual_pipeline_model_parallel_size is {config.virtual_pipeline_model_parallel_size}: virtual pipeline "
            "stages are not supported, build the model with one chunk a rank"
        )
    if model.position_embedding_type not in ("rope", "yarn", "none"):
        raise UnsupportedError(
            f"position_embedding_type is {model.position_embedding_type!r}: a drafter embeds tokens without positions, "
            "so the target must use rotary ones"
        )


class MegatronTarget:
    """One rank's part of a Megatron-Core model as a target.

    Every rank of a pipeline must call :meth:`features` (or :meth:`run_stage`) together; only the last stage gets
    features and may call :meth:`embed` and :meth:`logits`.
    """

    def __init__(self, model: GPTModel) -> None:
        _refuse(model)
        self.model = model
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.pp_group = mpu.get_pipeline_model_parallel_group()
        self._vocab_size = known_vocab_size(model)
        self._embedding_copy: nn.Module | None = None

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> TargetShape:
        """Sizes and settings."""
        return read_shape(self.model, self._vocab_size)

    @property
    def device(self) -> torch.device:
        """Where token ids must be."""
        return next(self.model.parameters()).device

    @property
    def hosts_drafter(self) -> bool:
        """Whether this rank's pipeline stage holds the drafter: the last one does."""
        return bool(self.model.post_process)

    def set_vocab_size(self, vocab_size: int) -> None:
        """Say how many of Megatron's padded vocabulary rows are real tokens.

        Raises:
            ConfigError: more than the model has.
        """
        if not 2 <= vocab_size <= self.model.vocab_size:
            raise ConfigError(
                f"vocab_size is {vocab_size}, but this Megatron model has {self.model.vocab_size} rows (padding "
                "included): give the tokenizer's vocabulary as the Hugging Face config states it"
            )
        self._vocab_size = int(vocab_size)

    @property
    def vocab_shard(self) -> VocabShard:
        """The part of the vocabulary that this tensor-parallel rank holds."""
        return VocabShard.of(self.model.vocab_size, self._vocab_size, self.tp_group)

    # ---- features --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _tapped(self, layer_ids: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect [S', B, D] outputs of this stage's tapped layers; S' is S, or its share with sequence parallelism."""
        taps: dict[int, Tensor] = {}
        handles = []
        for layer in self.model.decoder.layers:
            layer_id = layer.layer_number - 1
            if layer_id in layer_ids:

                def keep(module: nn.Module, args: Any, output: Any, layer_id: int = layer_id) -> None:
                    taps[layer_id] = output[0] if isinstance(output, tuple) else output

                handles.append(layer.register_forward_hook(keep))
        if EMBEDDING_TAP in layer_ids and self.model.pre_process:

            def keep_embedding(module: nn.Module, args: Any, output: Tensor) -> None:
                taps[EMBEDDING_TAP] = output

            handles.append(self.model.embedding.register_forward_hook(keep_embedding))
        try:
            yield taps
        finally:
            for handle in handles:
                handle.remove()

    @contextlib.contextmanager
    def _headless(self) -> Iterator[None]:
        """Run the stage in eval mode and without its output layer and multi-token-prediction layers."""
        model, training = self.model, self.model.decoder.training
        saved = model.post_process, model.mtp_process
        model.post_process = model.mtp_process = False
        if training:
            model.decoder.eval()
        try:
            yield
        finally:
            model.post_process, model.mtp_process = saved
            if training:
                model.decoder.train()

    def carried_taps(self, layer_ids: Sequence[int]) -> int:
        """How many taps the stages before this one have collected."""
        layers = self.model.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else self.model.config.num_layers
        return 0 if self.model.pre_process else sum(layer_id < first for layer_id in layer_ids)

    def carried_width(self, layer_ids: Sequence[int], *, sent: bool) -> int:
        """Last dimension of the tensor that this stage sends to the next one, or receives from the one before."""
        count = self.carried_taps(layer_ids)
        if sent:
            here = {layer.layer_number - 1 for layer in self.model.decoder.layers}
            here |= {EMBEDDING_TAP} if self.model.pre_process else set()
            count += sum(layer_id in here for layer_id in layer_ids)
        return (1 + count) * self.model.config.hidden_size

    @torch.no_grad()
    def run_stage(
        self, input_ids: Tensor, layer_ids: Sequence[int], carried: Tensor | None = None
    ) -> Tensor | TargetFeatures:
        """Run this rank's layers without gradients.

        Args:
            input_ids: [B, S].
            layer_ids: taps, ascending.
            carried: [S', B, (1 + taps so far) * D] of the stage before; None on the first.

        Returns:
            What to send to the next stage, or on the last stage the features [B, S, ...].
        """
        self._check_length(input_ids)
        width = self.model.config.hidden_size
        pieces: list[Tensor] = []
        if carried is not None:
            pieces = list(carried.detach().split(width, dim=-1))
            self.model.set_input_tensor(pieces.pop(0).contiguous())
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        with self._headless(), self._tapped(layer_ids) as taps:
            hidden = self.model(input_ids, position_ids, None)
        pieces += [taps[layer_id] for layer_id in sorted(taps)]
        if not self.hosts_drafter:
            return torch.cat([hidden, *pieces], dim=-1)
        if len(pieces) != len(layer_ids):
            raise UnsupportedError(f"{len(pieces)} taps arrived for target_layer_ids {list(layer_ids)}")
        return TargetFeatures(
            taps=self._whole_sequence(torch.cat(pieces, dim=-1)), last_hidden=self._whole_sequence(hidden)
        )

    def _check_length(self, input_ids: Tensor) -> None:
        size = self.tp_group.size()
        if self.model.config.sequence_parallel and input_ids.shape[1] % size:
            raise DataError(
                f"rows of {input_ids.shape[1]} tokens do not divide over {size} sequence-parallel ranks: pad rows to a "
                f"multiple of {size}"
            )

    def _whole_sequence(self, hidden: Tensor) -> Tensor:
        """[S', B, X] -> [B, S, X]."""
        if self.model.config.sequence_parallel and self.tp_group.size() > 1:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return hidden.transpose(0, 1).contiguous()

    @torch.no_grad()
    def features(
        self,
        input_ids: Tensor,
        layer_ids: Sequence[int],
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> TargetFeatures:
        """Taps [B, S, T*D] and last hidden [B, S, D] of [B, S] ids; every rank of the pipeline must call it together.

        Stages other than the last get empty taps and no last hidden state.

        Raises:
            UnsupportedError: rows that are padded on the left, packed, or have positions of their own.
        """
        self.check_inputs(input_ids, attention_mask, position_ids)
        carried = None
        if not self.model.pre_process:
            length = input_ids.shape[1]
            if self.model.config.sequence_parallel:
                length //= self.tp_group.size()
            shape = (length, input_ids.shape[0], self.carried_width(layer_ids, sent=False))
            carried = torch.empty(shape, dtype=self.model.config.pipeline_dtype, device=input_ids.device)
            torch.distributed.recv(carried, src=mpu.get_pipeline_model_parallel_prev_rank(), group=self.pp_group)
        result = self.run_stage(input_ids, layer_ids, carried)
        if isinstance(result, TargetFeatures):
            return result
        torch.distributed.send(
            result.contiguous(), dst=mpu.get_pipeline_model_parallel_next_rank(), group=self.pp_group
        )
        return TargetFeatures(taps=result.new_empty(*input_ids.shape, 0))

    def check_inputs(self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Refuse rows that a causal Megatron forward without masks would read wrongly."""
        if attention_mask is not None:
            if attention_mask.ndim != 2:
                raise UnsupportedError(
                    f"attention_mask of shape {tuple(attention_mask.shape)}: packed rows are not supported with "
                    "Megatron targets; set data.pack to false"
                )
            mask = attention_mask.bool()
            if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
                raise UnsupportedError("attention_mask starts with padding: pad rows on the right for Megatron targets")
        if position_ids is not None:
            plain = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            if not torch.equal(position_ids.to(plain.dtype), plain):
                raise UnsupportedError(
                    "position_ids other than 0, 1, 2, ... (packed rows) are not supported with Megatron targets; set "
                    "data.pack to false"
                )

    # ---- embedding and output projection ---------------------------------------------------------------------------

    @torch.no_grad()
    def sync_embedding(self) -> None:
        """Give the last stage its copy of the embedding. Every rank must call it, and again after loading weights."""
        model = self.model
        if model.pre_process or self.pp_group.size() == 1:
            self._embedding_copy = None
            if self.pp_group.size() == 1:
                return
        if model.share_embeddings_and_output_weights:
            if self.hosts_drafter:
                self._embedding_copy = self._new_embedding(model.output_layer.weight)
            return
        first, last = mpu.get_pipeline_model_parallel_first_rank(), mpu.get_pipeline_model_parallel_last_rank()
        if model.pre_process:
            torch.distributed.send(model.embedding.word_embeddings.weight.contiguous(), dst=last, group=self.pp_group)
        elif self.hosts_drafter:
            weight = torch.empty_like(model.output_layer.weight)
            torch.distributed.recv(weight, src=first, group=self.pp_group)
            self._embedding_copy = self._new_embedding(weight)

    def _new_embedding(self, weight: Tensor) -> nn.Module:
        """A frozen vocabulary-parallel embedding around a shard of weights."""
        config = dataclasses.replace(self.model.config, perform_initialization=False)
        embedding = VocabParallelEmbedding(
            self.model.vocab_size,
            self.model.config.hidden_size,
            init_method=nn.init.zeros_,
            config=config,
            tp_group=self.tp_group,
        )
        embedding.weight = nn.Parameter(weight, requires_grad=False)
        return embedding

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D] through the vocabulary-parallel embedding; all tensor-parallel ranks together."""
        if not self.model.pre_process and self._embedding_copy is None:
            raise UnsupportedError(
                "this pipeline stage has no copy of the target's embedding yet: call target.sync_embedding() on every "
                "rank"
            )
        embedding = self._embedding_copy or self.model.embedding.word_embeddings
        size = self.tp_group.size()
        if not (getattr(embedding, "reduce_scatter_embeddings", False) and size > 1):
            return embedding(ids.reshape(1, -1)).view(*ids.shape, -1)
        flat = ids.reshape(1, -1)
        padding = -flat.shape[1] % size
        scattered = embedding(nn.functional.pad(flat, (0, padding)))
        whole = gather_from_sequence_parallel_region(scattered, tensor_parallel_output_grad=False, group=self.tp_group)
        return whole[: flat.shape[1], 0].view(*ids.shape, -1)

    def logits_shard(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V'] through the output layer: this rank's real tokens, never the padding.

        ``hidden`` is the same on all ranks of the tensor-parallel group; its gradient is summed over them.
        """
        rows = hidden.reshape(-1, 1, hidden.shape[-1])
        count, layer = rows.shape[0], self.model.output_layer
        if layer.sequence_parallel and self.tp_group.size() > 1:
            rows = nn.functional.pad(rows, (0, 0, 0, 0, 0, -count % self.tp_group.size()))
            rows = scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        weight = self.model.shared_embedding_or_output_weight() if layer.weight is None else None
        logits, _ = layer(rows, weight=weight, runtime_gather_output=False)
        return logits[:count, 0, : self.vocab_shard.width].reshape(*hidden.shape[:-1], -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V], gathered over the tensor-parallel ranks: for evaluation. Training never gathers."""
        return gather_vocabulary(self.logits_shard(hidden), self.vocab_shard)

    def output_weight(self) -> Tensor | None:
        """[V, D] where one rank holds the whole output projection, else None."""
        if self.tp_group.size() > 1 or not self.hosts_drafter:
            return None
        return self.output_weight_shard()

    def output_weight_shard(self) -> Tensor | None:
        """[V', D] rows of this rank's real tokens when the output layer is a plain product, else None (quantised)."""
        from megatron.core.tensor_parallel import ColumnParallelLinear

        layer = self.model.output_layer
        weight = self.model.shared_embedding_or_output_weight() if layer.weight is None else layer.weight
        if type(layer) is not ColumnParallelLinear or layer.bias is not None or layer._forward_hooks:
            return None
        return weight.detach()[: self.vocab_shard.width]

    # ---- the drafter -----------------------------------------------------------------------------------------------

    def attached(self, drafter: Any) -> None:
        """After convert or restore, on every rank: make the drafter one of equal copies and give it its embedding.

        ``drafter`` is None on the stages that do not host one.
        """
        if drafter is not None:
            if drafter.config.draft_vocab_size is not None:
                raise UnsupportedError(
                    f"draft_vocab_size is {drafter.config.draft_vocab_size}: reduced vocabularies are not supported "
                    "with Megatron targets; leave it unset"
                )
            self.set_vocab_size(drafter.config.vocab_size)
            shard_drafter(drafter, self.vocab_shard, mpu.get_data_parallel_group(with_context_parallel=True))
            describe_shards(drafter)
        self.sync_embedding()


def drafter_config(model: Any) -> DrafterConfig:
    """The resolved config of a converted model's drafter, also on the stages that do not host it.

    Raises:
        ConfigError: the model was not converted.
    """
    from modelopt.torch.opt.conversion import ModeloptStateManager

    drafter = getattr(model, "drafter", None)
    if drafter is not None:
        return drafter.config
    if ModeloptStateManager.is_converted(model):
        from modelopt_spec.conversion import MODES

        for _, state in reversed(ModeloptStateManager(model).state_dict()):
            if "drafter" in state["metadata"]:
                values = state["metadata"]["drafter"]
                return MODES[values["algorithm"]](**values)
    raise ConfigError(f"this {type(model).__name__} has no drafter: call modelopt_spec.convert on every rank first")
