"""Configuration of a drafter: frozen, validated when it is built, and completed from the target.

Every field that may stay ``None`` is filled by :func:`resolve` from the target's :class:`TargetShape`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from modelopt_spec.errors import ConfigError, nearest
from modelopt_spec.layout import BlockLayout
from modelopt_spec.setting_errors import Problem, SettingError, problems_of

__all__ = [
    "MODES",
    "Algorithm",
    "BackboneConfig",
    "ConfidenceConfig",
    "DFlashConfig",
    "DSparkConfig",
    "DominoConfig",
    "DrafterConfig",
    "HeadConfig",
    "HyperConnectionConfig",
    "LatentAttentionConfig",
    "LossConfig",
    "MoEConfig",
    "SpecConfig",
]

Algorithm = Literal["dflash", "dspark", "domino"]


_NUMBERS = {
    "int": "a whole number",
    "<class 'int'>": "a whole number",
    "float": "a number",
    "<class 'float'>": "a number",
}
"""Annotations of number fields, as they print, and what messages call them."""


class SpecConfig(BaseModel, Mapping[str, Any]):  # type: ignore[misc]
    """Frozen base of all configs; an unknown key is an error that suggests the nearest known one.

    A mapping, as ModelOpt's own configs are; conversion.py makes them of the modes' configs. This one is not derived
    from them, so that recipes are checked without importing torch.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_assignment=False, validate_default=True)
    noun: ClassVar[str] = ""
    """What messages call these settings where they are not part of others; default: the class's name."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingError(type(self).noun or type(self).__name__, problems_of(error)) from None

    def __getitem__(self, key: str) -> Any:
        if key not in type(self).model_fields and key not in (self.model_extra or {}):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:  # type: ignore[override]
        yield from type(self).model_fields
        yield from self.model_extra or {}

    def __len__(self) -> int:
        return len(type(self).model_fields) + len(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in data:
                if key not in cls.model_fields:
                    text = (
                        f"has no field {key!r} (value {data[key]!r}).{nearest(str(key), cls.model_fields)} "
                        f"Known fields: {', '.join(cls.model_fields)}"
                    )
                    raise SettingError(cls.noun or cls.__name__, [Problem((), text)])
            cls._refuse_switches(data)
        return data

    @classmethod
    def _refuse_switches(cls, data: Mapping[str, Any]) -> None:
        """Refuse true and false where a number belongs: Python would take them for 1 and 0."""
        for key, value in data.items():
            field = cls.model_fields.get(key) if isinstance(value, bool) else None
            wanted = _NUMBERS.get(str(field.annotation).removesuffix(" | None")) if field is not None else None
            if wanted is not None:
                raise SettingError(cls.noun or cls.__name__, [Problem((key,), f"is {value}: it must be {wanted}")])

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """Plain JSON types by default: what ModelOpt's state and our checkpoints hold."""
        return super().model_dump(**{"mode": "json", "warnings": False, **kwargs})

    def replace(self, **changes: Any) -> Any:
        """A validated copy with some fields changed."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})


class HyperConnectionConfig(SpecConfig):
    """Manifold-constrained hyper-connections: parallel residual streams, mixed by a doubly stochastic matrix."""

    streams: int | None = Field(default=None, ge=1, le=16, description="n; a hyper-connected target's, or 4")
    sinkhorn_iterations: int | None = Field(default=None, ge=1, description="row and column normalisations; 20")
    eps: float | None = Field(default=None, gt=0, description="in every divisor and collapse weight; 1e-6")


class MoEConfig(SpecConfig):
    """Routed experts with optional shared ones; unset sizes follow a target that has experts itself."""

    num_experts: int | None = Field(default=None, ge=1, description="E, routed experts; the target's, or 8")
    experts_per_token: int | None = Field(default=None, ge=1, description="k; the target's, or 2")
    intermediate_size: int | None = Field(default=None, ge=1, description="width of one expert")
    num_shared_experts: int = Field(default=1, ge=0, description="experts that every token passes; 0 for none")
    scoring: Literal["sqrtsoftplus", "sigmoid", "softmax"] | None = Field(default=None, description="sqrtsoftplus")
    normalize_weights: bool | None = Field(default=None, description="divide chosen scores by their sum; true")
    routed_scaling_factor: float | None = Field(default=None, gt=0, description="on the routed experts' sum; 1")
    swiglu_limit: float | None = Field(default=None, gt=0, description="clamp of gate and up; none but in moe_mhc")
    balancing: Literal["bias", "loss", "none"] = Field(
        default="bias", description="bias: moved after each step towards even load; loss: an auxiliary term"
    )
    bias_update_rate: float = Field(default=1e-3, gt=0, description="step of the bias update")
    balance_weight: float = Field(default=1e-2, ge=0, description="weight of the auxiliary loss (balancing: loss)")

    @model_validator(mode="after")
    def _check(self) -> MoEConfig:
        experts, chosen = self.num_experts, self.experts_per_token
        if experts and chosen and chosen > experts:
            raise ConfigError(f"backbone.moe.experts_per_token is {chosen}, more than num_experts {experts}")
        return self


class LatentAttentionConfig(SpecConfig):
    """DeepSeek-V4's attention: one shared key/value head, low-rank queries, grouped low-rank output."""

    q_lora_rank: int | None = Field(default=None, ge=1, description="rank of the query projection")
    qk_rope_head_dim: int | None = Field(default=None, ge=2, description="trailing channels of a head that are rotated")
    o_groups: int | None = Field(default=None, ge=1, description="groups of heads in the output projection")
    o_lora_rank: int | None = Field(default=None, ge=1, description="rank of each group's output projection")

    @model_validator(mode="after")
    def _check(self) -> LatentAttentionConfig:
        if self.qk_rope_head_dim and self.qk_rope_head_dim % 2:
            raise ConfigError(f"backbone.latent_attention.qk_rope_head_dim {self.qk_rope_head_dim} must be even")
        return self


class BackboneConfig(SpecConfig):
    """The block-parallel transformer of a DFlash drafter; unset sizes follow the target."""

    type: Literal["dense", "moe_mhc"] = Field(
        default="dense", description="dense: Qwen3-style layers; moe_mhc: DeepSeek-V4 stages with hyper-connections"
    )
    num_layers: int | None = Field(default=None, ge=1, description="draft layers; 5, or fewer for a shallow target")
    hidden_size: int | None = Field(default=None, ge=1, description="D; must equal the target's to share its modules")
    num_attention_heads: int | None = Field(default=None, ge=1)
    num_key_value_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1, description="width of the MLP")
    hidden_act: str = Field(default="silu", description="engines serve silu only")
    rms_norm_eps: float | None = Field(default=None, gt=0)
    rope_parameters: dict[str, Any] | None = Field(
        default=None, description="as in transformers 5: rope_type, rope_theta and the scaling's own keys"
    )
    max_position_embeddings: int | None = Field(default=None, ge=1)
    attention_bias: bool = False
    causal: bool = Field(default=False, description="causal instead of bidirectional attention inside a block")
    sliding_window: int | None = Field(default=None, ge=1, description="context tokens that a block sees; null = all")
    window_rule: Literal["block", "query"] = Field(
        default="block",
        description="how the window is counted. block: the last `window` context tokens for the whole block "
        "(DeepSeek-V4 stages in vLLM and SGLang); query: from each slot (dense drafts everywhere, all in llama.cpp)",
    )
    attention_sink: bool = Field(default=False, description="one learned logit per head in the softmax denominator")
    residual: Literal["plain", "mhc"] = Field(
        default="plain", description="mhc: manifold-constrained hyper-connections"
    )
    mlp: Literal["dense", "moe"] = Field(default="dense", description="moe: routed and shared experts")
    hyper_connection: HyperConnectionConfig | None = Field(default=None, description="with residual: mhc")
    moe: MoEConfig | None = Field(default=None, description="with mlp: moe")
    latent_attention: LatentAttentionConfig | None = Field(default=None, description="with type: moe_mhc")
    layer_style: Literal["qwen3", "gemma4"] = Field(
        default="qwen3", description="gemma4: four norms a layer, normalised values, unscaled scores, gelu"
    )
    key_is_value: bool = Field(default=False, description="layer_style gemma4: keys and values share a projection")

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, data: Any) -> Any:
        """Sections that the chosen parts need, with their defaults."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("type") == "moe_mhc":
            for key, value in (("residual", "mhc"), ("mlp", "moe"), ("attention_sink", True)):
                data.setdefault(key, value)
            data["latent_attention"] = data.get("latent_attention") or {}
        if data.get("residual") == "mhc":
            data["hyper_connection"] = data.get("hyper_connection") or {}
        if data.get("mlp") == "moe":
            data["moe"] = data.get("moe") or {}
        if data.get("layer_style") == "gemma4":
            data.setdefault("hidden_act", "gelu_pytorch_tanh")
        return data

    @model_validator(mode="after")
    def _check_parts(self) -> BackboneConfig:
        deepseek = self.type == "moe_mhc"
        if deepseek and (self.residual, self.mlp, self.attention_sink) != ("mhc", "moe", True):
            raise ConfigError(
                "backbone.type moe_mhc has hyper-connections, experts and attention sinks: leave residual, mlp and "
                "attention_sink unset, or use type dense"
            )
        for section, needed, switch in (
            ("hyper_connection", self.residual == "mhc", "residual: mhc"),
            ("moe", self.mlp == "moe", "mlp: moe"),
            ("latent_attention", deepseek, "type: moe_mhc"),
        ):
            if getattr(self, section) is not None and not needed:
                raise ConfigError(f"backbone.{section} is given but has no effect without {switch}: set that too")
        if deepseek and self.moe and self.moe.num_shared_experts != 1:
            raise ConfigError(
                f"backbone.moe.num_shared_experts is {self.moe.num_shared_experts}, but DeepSeek-V4 stages have 1"
            )
        latent, heads, dim = self.latent_attention, self.num_attention_heads, self.head_dim
        if latent and latent.o_groups and heads and heads % latent.o_groups:
            raise ConfigError(
                f"backbone.latent_attention.o_groups {latent.o_groups} does not divide num_attention_heads {heads}"
            )
        if latent and latent.qk_rope_head_dim and dim and latent.qk_rope_head_dim > dim:
            raise ConfigError(
                f"backbone.latent_attention.qk_rope_head_dim {latent.qk_rope_head_dim} exceeds head_dim {dim}"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> BackboneConfig:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads and kv_heads and heads % kv_heads:
            raise ConfigError(
                f"backbone.num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        if self.head_dim and self.head_dim % 2:
            raise ConfigError(f"backbone.head_dim {self.head_dim} must be even (rotary embedding)")
        if self.layer_style == "gemma4" and (
            self.type != "dense" or self.residual != "plain" or self.mlp != "dense" or self.attention_sink
        ):
            raise ConfigError(
                "backbone.layer_style gemma4 is dense and plain: leave type, residual, mlp and attention_sink unset"
            )
        if self.key_is_value and self.layer_style != "gemma4":
            raise ConfigError("backbone.key_is_value is given but has no effect without layer_style: gemma4")
        return self


class HeadConfig(SpecConfig):
    """The correction head: which one, and its sizes."""

    type: str = Field(default="none", description="none, vanilla, gated, rnn, gru or a registered name")
    rank: int = Field(default=256, ge=1, description="R, width of the latent that W_out projects to the vocabulary")
    init: Literal["embedding", "random"] = Field(
        default="embedding",
        description="Markov heads: start W1 from the principal components of the target's embedding, or at random",
    )
    gru_hidden_dim: int | None = Field(default=None, ge=1, description="Domino: width of the GRU state; 2 R by default")
    pure_draft_prefix_len: int = Field(default=1, ge=0, description="Domino: drafted slots that keep base logits")


class ConfidenceConfig(SpecConfig):
    """The head that predicts, for each slot, whether its token will be accepted."""

    enabled: bool = False
    with_markov: bool = Field(default=True, description="also feed the head's embedding of the previous token")


class DrafterConfig(SpecConfig):
    """Everything that defines a drafter. ``None`` means: from the target."""

    algorithm: Algorithm = "dspark"
    block_size: int = Field(default=7, ge=2, le=64, description="K, slots of a block (gamma)")
    layout: BlockLayout = BlockLayout.ANCHOR_FIRST
    target_layer_ids: tuple[int, ...] | None = Field(default=None, description="taps, 0-based layer outputs")
    num_taps: int | None = Field(default=None, ge=1, description="how many taps to spread when ids are not given")
    mask_token: str | None = Field(default=None, description="token that fills undrafted slots, or 'auto'")
    mask_token_id: int | None = Field(default=None, ge=0)
    backbone: BackboneConfig = Field(default_factory=BackboneConfig)
    head: HeadConfig = Field(default_factory=HeadConfig)
    confidence: ConfidenceConfig = Field(default_factory=ConfidenceConfig)
    vocab_size: int | None = Field(default=None, ge=2, description="V, rows of the target's embedding")
    draft_vocab_size: int | None = Field(default=None, ge=2, description="reduced output vocabulary; null = full")
    target_hidden_size: int | None = Field(default=None, ge=1)
    num_target_layers: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> DrafterConfig:
        if self.algorithm == "dflash" and self.head.type != "none":
            raise ConfigError(
                f"head.type is {self.head.type!r} but mode 'dflash' has no correction head: "
                "use mode 'dspark' (vanilla, gated, rnn) or 'domino' (gru)"
            )
        if self.algorithm == "domino" and self.head.type != "gru":
            raise ConfigError(f"head.type is {self.head.type!r} but mode 'domino' is the gru head: use mode 'dspark'")
        if self.num_taps and self.target_layer_ids and self.num_taps != len(self.target_layer_ids):
            raise ConfigError(
                f"num_taps is {self.num_taps} but target_layer_ids names {len(self.target_layer_ids)}: give one of them"
            )
        if self.confidence.enabled and self.confidence.with_markov and self.head.type == "none":
            raise ConfigError(
                "confidence.with_markov is true but there is no correction head whose token embedding it could read: "
                "set confidence.with_markov to false"
            )
        return self


class DFlashConfig(DrafterConfig):
    """Mode ``dflash``: the backbone alone."""

    noun: ClassVar[str] = "mode dflash"

    algorithm: Algorithm = "dflash"


class DSparkConfig(DrafterConfig):
    """Mode ``dspark``: a Markov head (vanilla, gated or rnn) and a confidence head."""

    noun: ClassVar[str] = "mode dspark"

    algorithm: Algorithm = "dspark"
    head: HeadConfig = Field(default_factory=lambda: HeadConfig(type="vanilla"))
    confidence: ConfidenceConfig = Field(default_factory=lambda: ConfidenceConfig(enabled=True))

    @model_validator(mode="before")
    @classmethod
    def _head_defaults(cls, data: Any) -> Any:
        return _with_nested_defaults(data, head={"type": "vanilla"}, confidence={"enabled": True})


class DominoConfig(DrafterConfig):
    """Mode ``domino``: the GRU head."""

    noun: ClassVar[str] = "mode domino"

    algorithm: Algorithm = "domino"
    head: HeadConfig = Field(default_factory=lambda: HeadConfig(type="gru"))

    @model_validator(mode="before")
    @classmethod
    def _head_defaults(cls, data: Any) -> Any:
        return _with_nested_defaults(data, head={"type": "gru"})


MODES: dict[str, type[DrafterConfig]] = {"dflash": DFlashConfig, "dspark": DSparkConfig, "domino": DominoConfig}
"""Public mode names and their config classes."""


def _with_nested_defaults(data: Any, **defaults: dict[str, Any]) -> Any:
    """Fill what a partly given section leaves open with the mode's default instead of the section's."""
    if not isinstance(data, dict):
        return data
    filled = {name: {**values, **data[name]} for name, values in defaults.items() if isinstance(data.get(name), dict)}
    return {**data, **filled}


class LossConfig(SpecConfig):
    """Weights of the loss terms; a term of weight 0 costs nothing and asks for nothing.

    DSpark: ``ce * CE + tv * |p_d - p_t|_1 + confidence * BCE`` (weights ``exp(-k / decay)``).
    Domino: ``(1 - lambda) CE(final) + lambda CE(base)``, lambda falling linearly from ``base_ce_start`` to 0 over the
    first ``base_ce_decay_ratio`` of the steps. DFlash: plain CE, or KL distillation.
    """

    ce: float = Field(default=1.0, ge=0, description="cross entropy of the corrected logits against the data's token")
    tv: float = Field(default=0.0, ge=0, description="|p_draft - p_target|_1, the full L1 distance")
    confidence: float = Field(default=0.0, ge=0, description="BCE of the confidence logit against acceptance")
    kl: float = Field(default=0.0, ge=0, description="KL(p_target || p_draft)")
    base_ce_start: float = Field(default=0.0, ge=0, le=1, description="lambda at step 0 (Domino)")
    base_ce_decay_ratio: float = Field(default=0.5, gt=0, le=1, description="share of the steps until lambda is 0")
    decay: float | None = Field(default=4.0, gt=0, description="slots; null weighs all slots equally")
    position_weights: Literal["exp", "dpace"] = "exp"
    dpace_alpha: float = Field(default=0.5, ge=0, le=1, description="smoothing of D-PACE (arXiv 2605.18810)")
    stop_at_gap: bool | None = Field(default=None, description="null: true for dspark and anchor-first dflash")

    @model_validator(mode="after")
    def _check(self) -> LossConfig:
        if not (self.ce or self.tv or self.confidence or self.kl or self.base_ce_start):
            raise ConfigError("all loss weights are 0: give at least one of ce, tv, confidence, kl, base_ce_start")
        return self

    @property
    def needs_target(self) -> bool:
        """Whether a term compares with the target's distribution."""
        return bool(self.tv or self.confidence or self.kl)
