"""A raw training checkpoint of nvidia-modelopt 0.47: the target with its draft under ``dflash_module.``.

Sizes come from the tensors' shapes, everything else from the recorded conversion (``modelopt_state.pth``, read without
executing anything). Only read: the trainer of nvidia-modelopt writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelopt_spec.checkpoints.account import KeyReader
from modelopt_spec.checkpoints.layouts.base import NO_TARGET, Layout
from modelopt_spec.checkpoints.layouts.modelopt import flat_to_ours, ours_to_flat
from modelopt_spec.checkpoints.safe_read import TensorEntry, read_plain_state
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.config import (
    BackboneConfig,
    ConfidenceConfig,
    DFlashConfig,
    DominoConfig,
    DrafterConfig,
    DSparkConfig,
    HeadConfig,
)
from modelopt_spec.conventions import BlockLayout
from modelopt_spec.errors import CheckpointError

__all__ = ["ModelOptTrainingLayout"]

PREFIX = "dflash_module."
STATE_FILE = "modelopt_state.pth"
_DRAFT_ROPE_BASE = 10000.0
"""What its draft rotates with under transformers 5, whatever the target's base is (its look-up of it fails there)."""


class ModelOptTrainingLayout(Layout):
    """``save_pretrained`` of a model that nvidia-modelopt converted."""

    name = "modelopt_training"
    title = "nvidia-modelopt 0.47 training checkpoint"

    def recognises(self, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> bool:
        """By the prefix of the draft's tensors."""
        return any(name.startswith(PREFIX) for name in entries)

    def refuses(self, config: DrafterConfig) -> str | None:
        """Never written."""
        return "is what nvidia-modelopt's own trainer saves, and only read here; use layout 'modelopt'"

    def write_config(self, config: DrafterConfig, *, target: TargetFacts = NO_TARGET) -> dict[str, Any]:
        """Never called: :meth:`refuses` says no."""
        raise CheckpointError(f"layout {self.name!r} is only read")

    def read_config(self, keys: KeyReader, entries: Mapping[str, TensorEntry]) -> DrafterConfig:
        """Shapes and the recorded conversion; of ``config.json`` (the target's) only the target's facts."""
        recorded, where = _conversion(next(iter(entries.values())).file.parent)
        draft = recorded["dflash_architecture_config"]
        shapes = {name.removeprefix(PREFIX): e.shape for name, e in entries.items() if name.startswith(PREFIX)}
        place = next((p for p in ("text_config.", "llm_config.") if isinstance(keys.peek(p[:-1]), dict)), "")
        depth = keys.get("num_target_layers", f"{place}num_hidden_layers", convert=int)
        keys.ignore("the target's", *(key for key in keys.config))
        backbone = _backbone(shapes, recorded, draft, keys, place, where)
        ids = draft.get("target_layer_ids") or _default_taps(depth, backbone.num_layers or 1)
        mask = recorded.get("dflash_mask_token_id")
        if mask is None:
            raise CheckpointError(f"{where} has no dflash_mask_token_id: pass it as overrides={{'mask_token_id': ID}}")
        fields: dict[str, Any] = {
            "block_size": recorded["dflash_block_size"],
            "target_layer_ids": tuple(ids),
            "num_taps": len(ids),
            "mask_token_id": mask,
            "backbone": backbone,
            "vocab_size": keys.get("vocab_size", f"{place}vocab_size", convert=int),
            "target_hidden_size": keys.get("target_hidden_size", f"{place}hidden_size", convert=int),
            "num_target_layers": depth,
        }
        kind = draft.get("projector_type", "dflash")
        if kind == "dspark":
            head = HeadConfig(type=draft.get("markov_head_type", "vanilla"), rank=draft["markov_rank"])
            confidence = ConfidenceConfig(enabled="confidence_proj.weight" in shapes)
            return DSparkConfig(**fields, head=head, confidence=confidence)
        if kind == "domino":
            head = HeadConfig(
                type="gru",
                rank=draft["emb_dim"],
                gru_hidden_dim=draft["gru_hidden_dim"],
                pure_draft_prefix_len=draft.get("pure_draft_prefix_len", 1),
            )
            shifted = draft.get("shift_label", True)
            layout = BlockLayout.ANCHOR_FIRST if shifted else BlockLayout.BONUS_ANCHOR
            return DominoConfig(**fields, head=head, layout=layout)
        if kind != "dflash":
            raise CheckpointError(f"{where}: projector_type {kind!r} is not known; known are dflash, dspark and domino")
        return DFlashConfig(**fields, layout=BlockLayout.BONUS_ANCHOR)

    def file_name(self, ours: str) -> str:
        """Flat names under the prefix."""
        return PREFIX + ours_to_flat(ours)

    def our_name(self, name: str) -> str:
        """Inverse of :meth:`file_name`; the target's tensors have no name of ours."""
        return flat_to_ours(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else f"target:{name}"

    def known_extra(self, name: str) -> str | None:
        """The target's weights and rotary buffers."""
        if not name.startswith(PREFIX):
            return "the target's own weight"
        return "recomputed" if "rotary_emb" in name else None


def _conversion(directory: Path) -> tuple[dict[str, Any], str]:
    """The recorded config of nvidia-modelopt's ``dflash`` mode."""
    file = directory / STATE_FILE
    state = read_plain_state(file)
    for entry in state.get("modelopt_state_dict", ()):
        if isinstance(entry, list | tuple) and len(entry) == 2 and entry[0] == "dflash":
            config = entry[1].get("config") if isinstance(entry[1], dict) else None
            if isinstance(config, dict) and "dflash_architecture_config" in config:
                return config, str(file)
    raise CheckpointError(f"{file} records no dflash conversion, so the draft's block size and taps are unknown")


def _backbone(
    shapes: Mapping[str, tuple[int, ...]],
    recorded: Mapping[str, Any],
    draft: Mapping[str, Any],
    keys: KeyReader,
    place: str,
    where: str,
) -> BackboneConfig:
    """Sizes from the tensors; rope from the draft's own config, as its training ran."""
    try:
        head_dim = shapes["layers.0.self_attn.q_norm.weight"][0]
        heads = shapes["layers.0.self_attn.q_proj.weight"][0] // head_dim
        kv_heads = shapes["layers.0.self_attn.k_proj.weight"][0] // head_dim
        width, inner = shapes["norm.weight"][0], shapes["layers.0.mlp.gate_proj.weight"][0]
    except (KeyError, IndexError):
        raise CheckpointError(f"{where}: the draft under {PREFIX} is incomplete") from None
    if "sliding_attention" in (draft.get("layer_types") or []):
        raise CheckpointError(f"{where}: per-layer windows are not supported; dflash_swa_window_size is")
    version = str(keys.get("transformers version", "transformers_version", default="5"))
    base = _DRAFT_ROPE_BASE
    if int(version.split(".")[0]) < 5:
        base = keys.get("rope_theta", f"{place}rope_theta", convert=float)
    rope = {"rope_type": "default", "rope_theta": base, **(draft.get("rope_parameters") or {})}
    return BackboneConfig(
        num_layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        hidden_act=draft.get("hidden_act", "silu"),
        rms_norm_eps=draft.get("rms_norm_eps", 1e-6),
        rope_parameters=rope,
        max_position_embeddings=keys.get(
            "max_position_embeddings", f"{place}max_position_embeddings", default=32768, convert=int
        ),
        attention_bias=bool(draft.get("attention_bias", False)),
        causal=recorded.get("dflash_draft_attention") == "causal",
        sliding_window=recorded.get("dflash_swa_window_size"),
        window_rule="query" if recorded.get("dflash_swa_window_size") else "block",
        attention_sink=bool(recorded.get("dflash_attention_sink", False)),
    )


def _default_taps(depth: int, count: int) -> list[int]:
    """Its uniform choice of taps where none are named."""
    if count == 1:
        return [depth // 2]
    first = min(1, depth - 1)
    last = max(first, depth - 3)
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]
