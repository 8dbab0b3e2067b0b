"""DeepSpec's Gemma-4 drafts: our layers against transformers' own, the layout both ways, what vLLM reads."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma4

from modelopt_spec.checkpoints.compare import StandIn, draft_block, training_block
from modelopt_spec.checkpoints.export import export, prove
from modelopt_spec.checkpoints.importing import canonical, load_drafter, read_draft
from modelopt_spec.checkpoints.preflight import check
from modelopt_spec.checkpoints.store import save
from modelopt_spec.conversion import convert
from modelopt_spec.drafter.attention import plan_decode
from modelopt_spec.drafter.layers import Rotary
from modelopt_spec.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoints.drafts import draft_of, randomise
from tests.tiny import tiny

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "proportional": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
TARGET = {
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "sliding_window": 16,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 0,
}


def target():
    return tiny("gemma4_text", **TARGET)


def converted(*, rope="proportional", shared=True, head="vanilla", model=None):
    model = model or target()
    backbone = {
        "layer_style": "gemma4",
        "key_is_value": shared,
        "head_dim": 16,
        "num_key_value_heads": 1 if shared else 2,
        "rope_parameters": ROPES[rope],
    }
    config = {"mask_token_id": 96, "block_size": 5, "head": {"type": head, "rank": 6}, "backbone": backbone}
    convert(model, ("dspark", config), quiet=True)
    randomise(model.drafter)
    for index, layer in enumerate(model.drafter.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * index)
    return model


class Reference(nn.Module):
    """One layer of transformers' Gemma-4 with a second input whose keys and values come before its own."""

    def __init__(self, backbone, layer):
        super().__init__()
        config = Gemma4TextConfig(
            hidden_size=backbone.hidden_size,
            intermediate_size=backbone.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=backbone.num_attention_heads,
            num_key_value_heads=backbone.num_key_value_heads,
            num_global_key_value_heads=backbone.num_key_value_heads,
            head_dim=backbone.head_dim,
            global_head_dim=backbone.head_dim,
            attention_k_eq_v=backbone.key_is_value,
            hidden_size_per_layer_input=0,
            layer_types=["full_attention"],
            rope_parameters={"full_attention": dict(backbone.rope_parameters)},
        )
        self.layer = gemma4.Gemma4TextDecoderLayer(config, 0)
        self.rotary = gemma4.Gemma4TextRotaryEmbedding(config)
        self.layer.load_state_dict(layer.state_dict())

    def forward(self, x, context):
        """[K, D] slots after [C, D] context, which is projected as it is."""
        layer, attention = self.layer, self.layer.self_attn
        both = torch.cat([context, layer.input_layernorm(x)]).unsqueeze(0)
        cos, sin = self.rotary(both, torch.arange(both.shape[1]).unsqueeze(0), "full_attention")
        heads = (1, -1, both.shape[1], attention.head_dim)

        def split(projected):
            return projected.view(1, both.shape[1], -1, attention.head_dim)

        q = gemma4.apply_rotary_pos_emb(attention.q_norm(split(attention.q_proj(both))), cos, sin, unsqueeze_dim=2)
        k = split(attention.k_proj(both))
        v = attention.v_norm(k if attention.v_proj is None else split(attention.v_proj(both)))
        k = gemma4.apply_rotary_pos_emb(attention.k_norm(k), cos, sin, unsqueeze_dim=2)
        q, k, v = (t.transpose(1, 2).reshape(heads) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mixed = (q[:, :, len(context) :] @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + layer.post_attention_layernorm(attention.o_proj(mixed.transpose(1, 2).flatten(2)))[0]
        x = x + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
        return x * layer.layer_scalar


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("shared", [True, False])
@torch.no_grad()
def test_layers_are_those_of_transformers(rope, shared):
    drafter = converted(rope=rope, shared=shared, model=tiny("llama")).drafter
    generator = torch.Generator().manual_seed(0)
    x, context = torch.randn(5, 32, generator=generator), torch.randn(9, 32, generator=generator)
    layer, rotary = drafter.layers[1], Rotary(drafter.config.backbone)
    slots, before = rotary(torch.arange(9, 14), x.dtype), rotary(torch.arange(9), x.dtype)
    k, v = layer.self_attn.keys_values(context, before)
    cache = drafter.new_cache(1)
    cache.advance(torch.tensor([9]))
    plan = plan_decode(torch.tensor([9]), block_size=5, context_len=9, causal=False, window=None, window_rule="block")
    ours = layer.decode(x.unsqueeze(0), slots, k.unsqueeze(0), v.unsqueeze(0), plan)[0]
    theirs = Reference(drafter.config.backbone, layer)(x, context)
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_training_and_decoding_agree():
    drafter = converted().drafter
    stand_in = StandIn(32, 97)
    taps = torch.randn(9, 96, generator=torch.Generator().manual_seed(0))
    ours = draft_block(drafter, taps, 3, stand_in.embed, stand_in.logits)
    trained = training_block(drafter, taps, [3, *ours.tokens[:-1]], stand_in.embed, stand_in.logits)
    assert torch.allclose(ours.hidden, trained.hidden, atol=1e-4)
    assert ours.tokens == trained.tokens


@pytest.mark.parametrize(
    ("rope", "shared", "head"),
    [("proportional", True, "vanilla"), ("default", False, "gated"), ("proportional", False, "rnn")],
)
def test_export_and_import_are_inverse(tmp_path, rope, shared, head):
    model = converted(rope=rope, shared=shared, head=head)
    report = export(model, tmp_path / "a", layout="deepspec_gemma4", dtype="float32", quiet=True)
    assert report.engines == (("vllm",) if shared and head == "vanilla" else ())
    assert report.worst_difference < 1e-5
    imported = read_draft(tmp_path / "a")
    assert imported.layout.name == "deepspec_gemma4"
    assert canonical(imported.draft.config) == canonical(model.drafter.config)
    other = load_drafter(tmp_path / "a", target(), quiet=True)
    for name, tensor in model.drafter.state_dict().items():
        assert torch.equal(other.drafter.state_dict()[name], tensor), name
    export(other, tmp_path / "b", layout="deepspec_gemma4", dtype="float32", quiet=True)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_file_carries_the_targets_modules(tmp_path):
    model = converted()
    export(model, tmp_path / "out", engines=["vllm"], quiet=True)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["embed_tokens.weight"], model.get_input_embeddings().weight)
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["final_logit_softcapping"] == 30.0
    assert Gemma4TextConfig(**{k: v for k, v in config.items() if k != "architectures"}).global_head_dim == 16
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    assert check(tmp_path / "out", target(), ["vllm"]).disagreements == ("own modules",)
    save(model, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="carries the target's embedding"):
        export(tmp_path / "ours", tmp_path / "again", quiet=True)
    assert not (tmp_path / "again").exists()


MUTATIONS = [
    ("layer style", lambda c: c.update(attention_k_eq_v=False, num_key_value_heads=1)),
    ("shape", lambda c: c.update(num_attention_heads=2)),
    ("shape", lambda c: c.update(global_head_dim=8)),
    ("rope base", lambda c: c["rope_parameters"]["full_attention"].update(rope_theta=1e4)),
    ("rotated share", lambda c: c["rope_parameters"]["full_attention"].update(partial_rotary_factor=0.5)),
    ("norm epsilon", lambda c: c.update(rms_norm_eps=1e-5)),
    ("activation", lambda c: c.update(hidden_activation="silu")),
    ("causality", lambda c: c.update(is_causal=True)),
    ("taps", lambda c: c.update(target_layer_ids=[2, 3, 4])),
    ("mask token", lambda c: c.update(mask_token_id=5)),
    ("block size", lambda c: c.update(block_size=6)),
    ("head rank", lambda c: c.update(markov_rank=7)),
    ("confidence head", lambda c: c.update(enable_confidence_head=False)),
    ("logit soft-cap", lambda c: c.update(final_logit_softcapping=20.0)),
    ("longest context", lambda c: c.update(max_position_embeddings=128)),
    ("format", lambda c: c.update(architectures=["Qwen3DSparkModel"])),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    out = tmp_path_factory.mktemp("gemma4") / "draft"
    export(converted(), out, quiet=True)
    assert check(out, target()).ok
    return out


@pytest.mark.parametrize(("fact", "change"), MUTATIONS)
def test_a_changed_fact_is_named_and_no_other(tmp_path, exported, fact, change):
    out = tmp_path / "changed"
    out.mkdir()
    for path in exported.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    assert check(out, target()).disagreements == (fact,)


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="key_is_value is given but has no effect"):
        converted_with(key_is_value=True)
    with pytest.raises(ConfigError, match="layer_style gemma4 is dense and plain"):
        converted_with(layer_style="gemma4", attention_sink=True)
    model = converted()
    for engine in ("sglang", "llama.cpp", "tensorrt_llm"):
        with pytest.raises(UnsupportedError, match="Gemma-4 layers"):
            export(model, tmp_path / "out", engines=[engine], quiet=True)
    with pytest.raises(UnsupportedError, match="Qwen3-style layers only"):
        export(model, tmp_path / "out", layout="deepspec", quiet=True)
    with pytest.raises(UnsupportedError, match="multiplies the draft's embeddings"):
        export(converted(model=tiny("llama")), tmp_path / "out", engines=["vllm"], quiet=True)
    assert list(tmp_path.iterdir()) == []


def converted_with(**backbone):
    convert(tiny("llama"), ("dspark", {"mask_token_id": 96, "backbone": backbone}), quiet=True)


def test_the_independent_reader_agrees_beyond_one_block(tmp_path):
    model = converted(rope="default", shared=False)
    export(model, tmp_path / "out", quiet=True)
    for comparison in prove(draft_of(model), tmp_path / "out", contexts=(1, 2, 19, 80)):
        assert comparison.worst < 1e-5
        assert comparison.same_tokens
