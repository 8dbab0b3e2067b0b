"""The preflight names the fact that was changed in an exported directory, and no other."""

import copy
import dataclasses
import functools
import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelopt_spec.checkpoints.engines import ENGINES, ExportPlan
from modelopt_spec.checkpoints.export import export, write_draft
from modelopt_spec.checkpoints.layouts import get_layout
from modelopt_spec.checkpoints.preflight import FACTS, check
from modelopt_spec.checkpoints.preflight import dynamic as dynamic_module
from tests.checkpoints.drafts import cached_draft, converted
from tests.tiny import tiny

_UNCHANGED: set[Path] = set()
SCALED = ("vanilla", "gemma3_text")


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """One exported directory for each kind of drafter, not to be changed."""
    root = tmp_path_factory.mktemp("exports")
    made: dict[str, Path] = {}

    def get(case: str, layout: str | None = None, target: str = "llama") -> Path:
        name = f"{case}-{layout}-{target}"
        if name not in made:
            made[name] = root / name
            dtype = "bfloat16" if case.startswith("domino") else None
            export(converted(case, target=target), made[name], layout=layout, dtype=dtype, quiet=True)
        return made[name]

    return get


def changed(source: Path, out: Path, change) -> Path:
    """A copy of a directory with a changed config.json; ``change`` may also take the directory's path."""
    out.mkdir()
    for path in source.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    return out


def both(**values):
    """Set keys at the top level and, where it has them, in ``dflash_config``."""

    def change(config):
        config.update(values)
        for key, value in values.items():
            if key in config.get("dflash_config", {}):
                config["dflash_config"][key] = value

    return change


def nested(**values):
    return lambda config: config["dflash_config"].update(values)


def inner(**values):
    return lambda config: config["transformer_layer_config"].update(values)


def rope(**values):
    def change(config):
        config["rope_parameters"].update(values)
        if config["rope_scaling"]:
            config["rope_scaling"].update({k: v for k, v in values.items() if k != "rope_theta"})
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]

    return change


MUTATIONS = [
    # fact, case, layout, change
    ("format", "vanilla", None, lambda c: c.update(architectures=["DFlashDraftModel"])),
    ("format", "vanilla", None, lambda c: c.update(architectures=["Qwen3ForCausalLM"])),
    ("format", "domino", None, lambda c: c["dflash_config"].update(projector_type="dflash")),
    ("target", "vanilla", None, lambda c: c.update(num_target_layers=7)),
    ("taps", "vanilla", None, both(target_layer_ids=[0, 2, 3])),
    ("taps", "vanilla", None, lambda c: c.update(target_layer_ids=[2, 3, 4])),
    ("taps", "vanilla", None, nested(target_layer_ids=[2, 3, 4])),
    ("taps", "dflash_bonus", None, nested(target_layer_ids=[2, 3, 4])),
    ("taps", "vanilla", "speculators", lambda c: c.update(aux_hidden_state_layer_ids=[1, 2, 3])),
    ("taps", "vanilla", "nemotron", lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
    ("anchor layout", "vanilla", None, lambda c: c.update(sample_from_anchor=False)),
    ("anchor layout", "vanilla", None, lambda c: (both(sample_from_anchor=False)(c), nested(shift_label=False)(c))),
    ("anchor layout", "domino", None, nested(shift_label=False)),
    ("anchor layout", "vanilla", "speculators", lambda c: c.update(sample_from_anchor=False)),
    ("block size", "vanilla", None, lambda c: c.update(block_size=6)),
    ("block size", "dflash_bonus", None, lambda c: c.update(block_size=4)),
    ("block size", "vanilla", "speculators", lambda c: c.update(block_size=4)),
    ("mask token", "vanilla", None, both(mask_token_id=5)),
    ("mask token", "vanilla", None, nested(mask_token_id=5)),
    ("mask token", "dflash_bonus", None, nested(mask_token_id=5)),
    ("shape", "vanilla", None, lambda c: c.update(num_attention_heads=8)),
    ("shape", "vanilla", None, lambda c: c.pop("head_dim")),
    ("shape", "vanilla", None, lambda c: c.pop("num_key_value_heads")),
    ("shape", "vanilla", "speculators", inner(intermediate_size=64)),
    ("rope base", "vanilla", None, rope(rope_theta=20000.0)),
    ("rope base", "vanilla", None, lambda c: c.update(rope_theta=20000.0)),
    ("rope scaling", "yarn", None, rope(factor=2.0)),
    ("rope scaling", "llama3", None, rope(low_freq_factor=2.0)),
    ("rope scaling", "yarn", None, lambda c: c.update(rope_scaling=None, rope_parameters={"rope_theta": 10000.0})),
    ("rotated share", "vanilla", None, lambda c: c.update(partial_rotary_factor=0.5)),
    ("rotated share", "vanilla", None, lambda c: c["rope_parameters"].update(partial_rotary_factor=0.5)),
    ("norm epsilon", "vanilla", None, lambda c: c.update(rms_norm_eps=1e-5)),
    ("activation", "vanilla", None, lambda c: c.update(hidden_act="gelu")),
    ("attention bias", "vanilla", None, lambda c: c.update(attention_bias=True)),
    ("longest context", "vanilla", None, lambda c: c.update(max_position_embeddings=128)),
    ("window", "window", None, lambda c: (c.update(sliding_window=7), nested(swa_window_size=7)(c))),
    ("window", "window", None, lambda c: c.update(sliding_window=7)),
    ("window", "window", None, lambda c: c.update(use_sliding_window=False)),
    (
        "window",
        "vanilla",
        None,
        lambda c: c.update(sliding_window=7, use_sliding_window=True, layer_types=["sliding_attention"] * 3),
    ),
    (
        "window",
        "vanilla",
        None,
        lambda c: c.update(layer_types=["full_attention", "sliding_attention", "full_attention"]),
    ),
    ("causality", "vanilla", None, lambda c: (c.update(is_causal=True), nested(causal=True)(c))),
    ("causality", "vanilla", None, lambda c: c.update(is_causal=True)),
    ("causality", "window", None, lambda c: (c.update(is_causal=False), nested(causal=False)(c))),
    ("attention sink", "sink", None, nested(attention_sink_bias=False)),
    ("embedding scale", *SCALED, nested(input_embedding_scale=1.0)),
    ("logit soft-cap", *SCALED, nested(final_logit_softcapping=20.0)),
    ("logit scale", "vanilla", "granite", nested(output_multiplier=1.0)),
    ("vocabulary", "vanilla", None, lambda c: c.update(vocab_size=96)),
    ("draft vocabulary", "reduced", None, lambda c: c.update(draft_vocab_size=30)),
    ("draft vocabulary", "reduced", None, lambda c: c.pop("draft_vocab_size")),
    ("draft vocabulary", "vanilla", None, lambda c: c.update(draft_vocab_size=30)),
    ("head", "vanilla", None, lambda c: c.update(markov_head_type="gated")),
    ("head", "rnn", None, lambda c: c.update(markov_head_type="gated")),
    ("head", "vanilla", None, lambda c: c.update(markov_rank=0)),
    ("head rank", "vanilla", None, lambda c: c.update(markov_rank=7)),
    ("head rank", "domino", None, both(emb_dim=7)),
    ("head state", "domino", None, nested(gru_hidden_dim=12)),
    ("pure prefix", "domino", None, nested(pure_draft_prefix_len=2)),
    ("confidence head", "vanilla", None, lambda c: c.update(enable_confidence_head=False)),
    ("confidence input", "vanilla", None, lambda c: c.update(confidence_head_with_markov=False)),
    ("dtype", "vanilla", None, lambda c: c.update(dtype="bfloat16", torch_dtype="bfloat16")),
    ("dtype", "vanilla", None, lambda c: c.update(torch_dtype="float16")),
]


@functools.cache
def target_of(layout_or_target=None):
    """A target to check against; nothing here changes it."""
    if layout_or_target == "gemma3_text":
        return tiny("gemma3_text", final_logit_softcapping=30.0)
    if layout_or_target == "granite":
        return tiny("granite", logits_scaling=2.0, embedding_multiplier=3.0)
    return tiny("llama")


@pytest.mark.parametrize(("fact", "case", "layout", "change"), MUTATIONS)
def test_a_changed_fact_is_named_and_no_other(tmp_path, exports, fact, case, layout, change):
    if layout in ("gemma3_text", "granite"):
        source = scaled_export(tmp_path / "source", layout)
    else:
        source = exports(case, layout)
    target = target_of(layout)
    if source not in _UNCHANGED:
        assert check(source, target).disagreements == ()
        _UNCHANGED.add(source)
    report = check(changed(source, tmp_path / "changed", change), target)
    assert report.disagreements == (fact,)
    assert report.exit_status == 1


def scaled_export(out, kind):
    """A draft of a target that scales embeddings and scales or caps logits, which only llama.cpp serves."""
    from modelopt_spec.conversion import convert
    from tests.checkpoints.drafts import randomise

    model = target_of.__wrapped__(kind)
    convert(model, ("dspark", {"mask_token_id": 96, "block_size": 5, "head": {"rank": 6}}), quiet=True)
    randomise(model.drafter)
    report = export(model, out, quiet=True)
    assert report.engines == ("llama.cpp",)
    assert "embedding" in report.refused["vllm"]
    return out


def test_every_fact_in_the_list_is_covered():
    """The others have tests of their own: below, in test_quantise and in test_gemma4."""
    others = {"window rule", "d2t", "weights", "own modules", "mask row", "block", "quantisation", "layer style"}
    assert {fact for fact, *_ in MUTATIONS} | others == set(FACTS)


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("fact", "case", "change"),
    [
        ("weights", "vanilla", lambda t: t["norm.weight"].mul_(1.01)),
        ("weights", "vanilla", lambda t: t.pop("layers.1.mlp.up_proj.weight")),
        ("weights", "vanilla", lambda t: t.update({"extra.weight": torch.zeros(2)})),
        ("weights", "reduced", lambda t: t["d2t"].add_(1)),
        ("d2t", "reduced", lambda t: t.pop("d2t")),
        ("draft vocabulary", "reduced_dflash", lambda t: t.pop("lm_head.weight")),
        ("own modules", "vanilla", lambda t: t.update({"embed_tokens.weight": torch.randn(97, 32)})),
        ("own modules", "vanilla", lambda t: t.update({"lm_head.weight": torch.randn(97, 32)})),
        ("dtype", "vanilla", lambda t: t.update({n: x.bfloat16() for n, x in t.items()})),
        ("head", "vanilla", lambda t: t.update({"markov_head.gate_proj.weight": torch.zeros(6, 38)})),
    ],
)
def test_changed_tensors(tmp_path, exports, fact, case, change):
    directory = changed(exports(case), tmp_path / "changed", lambda c: None)
    edit_tensors(directory, change)
    assert check(directory, target_of()).disagreements == (fact,)


def test_window_rule_of_training_is_not_the_engines(tmp_path, exports):
    """A card that says ``block``: what a drafter was trained with when its window was counted from the anchor."""
    directory = changed(exports("window"), tmp_path / "changed", lambda c: None)
    card = json.loads((directory / "drafter_card.json").read_text())
    card["trained"]["backbone"]["window_rule"] = "block"
    (directory / "drafter_card.json").write_text(json.dumps(card))
    assert check(directory, target_of()).disagreements == ("window rule",)


def test_mask_embedding_file(tmp_path, exports):
    directory = changed(exports("dflash_bonus"), tmp_path / "changed", lambda c: None)
    (directory / "mask_embedding.pt").write_bytes(b"x")
    assert check(directory, target_of()).disagreements == ("mask row",)


def test_block_is_the_backstop(exports, monkeypatch):
    """What no static fact knows: here, a reader that rotates by one position more."""
    draft_block = dynamic_module.IndependentDraft.block

    def shifted(self, taps, *args, **kwargs):
        return draft_block(self, torch.cat([taps[:1], taps]), *args, **kwargs)

    monkeypatch.setattr(dynamic_module.IndependentDraft, "block", shifted)
    report = check(exports("vanilla"), target_of())
    assert report.disagreements == ("block",)


def test_blocks_of_several_lengths_beyond_the_training_length(exports):
    report = check(exports("vanilla"), target_of())
    lengths = [int(fact.trained.split()[0]) for fact in report.facts if fact.name == "block"]
    assert lengths == [1, 5, 8, 40, 251]
    assert [f.trained for f in check(exports("vanilla"), contexts=[3]).facts if f.name == "block"] == [
        "3 context positions"
    ]


def test_a_config_that_an_engine_cannot_parse_is_a_disagreement(exports, monkeypatch):
    def reads(directory, target):
        raise TypeError("head_dim must be a number")

    directory = exports("vanilla")
    monkeypatch.setattr(ENGINES["vllm"], "reads", reads)
    report = check(directory, dynamic=False)
    assert report.disagreements == ("format",)
    assert [(fact.engine, fact.verdict) for fact in report.facts if fact.bad] == [("vllm", "fails")]


def test_another_target(exports):
    for changes in ({"num_hidden_layers": 8}, {"vocab_size": 90}, {"hidden_size": 40}):
        report = check(exports("vanilla"), tiny("llama", **changes), dynamic=False)
        assert report.disagreements == ("target",), changes


class Tokenizer:
    """The part of a tokenizer that the mask token is held against."""

    chat_template = "<|im_start|>"
    pad_token_id, eos_token_id = 90, 91

    def __init__(self, size=97):
        self.size = size
        token = lambda text: type("T", (), {"content": text, "special": True})()  # noqa: E731
        self.added_tokens_decoder = {
            90: token("<pad>"),
            93: token("<|im_start|>"),
            96: token("<|mask|>"),
        }

    def __len__(self):
        return self.size

    def convert_ids_to_tokens(self, token_id):
        return f"t{token_id}"


@pytest.mark.parametrize(
    ("mask", "size", "message"),
    [
        (96, 97, None),
        (96, 60, None),
        (5, 97, "ordinary"),
        (93, 97, "chat template"),
        (90, 97, "another meaning"),
        (2, 97, "eos"),
    ],
)
def test_mask_token_must_not_stand_in_text(tmp_path, mask, size, message):
    draft = cached_draft("vanilla")
    config = draft.config.replace(mask_token_id=mask)
    plan = ExportPlan(config, get_layout("deepspec"), (), {})
    write_draft(type(draft)(config, draft.tensors), plan, tmp_path)
    report = check(tmp_path, target_of(), ["vllm"], tokenizer=Tokenizer(size), dynamic=False)
    notes = [fact.note for fact in report.facts if fact.bad]
    assert (message is None and not notes) or (message is not None and all(message in note for note in notes) and notes)


def test_directory_without_a_card_is_held_against_the_engines_alone(tmp_path):
    draft = cached_draft("gated")
    write_draft(draft, ExportPlan(draft.config, get_layout("deepspec"), (), {}), tmp_path)
    report = check(tmp_path, target_of())
    assert report.ok
    assert report.engines == ("sglang",)
    assert "gated" in report.not_served["vllm"]
    assert any("no drafter_card" in line for line in report.skipped)
    named = check(tmp_path, target_of(), ["vllm"])
    assert named.exit_status == 1
    assert named.disagreements == ("head",)


def test_trained_config_may_be_given(tmp_path):
    draft = cached_draft("vanilla")
    write_draft(draft, ExportPlan(draft.config, get_layout("deepspec"), (), {}), tmp_path)
    assert check(tmp_path, trained=draft.config).ok
    other = draft.config.replace(target_layer_ids=(0, 1, 2))
    assert check(tmp_path, trained=other).disagreements == ("taps",)


def test_what_modelopt_exports_fails_in_every_engine(tmp_path):
    """Why its directories serve nowhere: SGLang would take it for a headless bonus-anchor draft."""
    draft = cached_draft("vanilla")
    write_draft(draft, ExportPlan(draft.config, get_layout("modelopt"), (), {}), tmp_path)
    for engine in ("vllm", "sglang", "llama.cpp"):
        report = check(tmp_path, target_of(), [engine])
        assert report.exit_status == 1
        assert "head" in report.disagreements


def test_report_is_plain_data_and_prints(exports, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = check(exports("vanilla"), target_of(), quiet=False)
    json.dumps(report.to_dict())
    copy.deepcopy(report)
    assert "rope base" in capsys.readouterr().err


def test_export_refuses_what_its_own_preflight_refuses(tmp_path, monkeypatch):
    from modelopt_spec.checkpoints.layouts.deepspec import DeepSpecLayout
    from modelopt_spec.errors import CheckpointError

    write = DeepSpecLayout.write_config

    def forgetful(self, config, **kwargs):
        keys = write(self, config, **kwargs)
        del keys["enable_confidence_head"], keys["confidence_head_with_markov"]
        keys["dflash_config"]["enable_confidence_head"] = True
        return keys

    monkeypatch.setattr(DeepSpecLayout, "write_config", forgetful)
    with pytest.raises(CheckpointError, match="confidence head: the engine will do something else"):
        export(converted(), tmp_path / "out", quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_a_target_in_low_precision_does_not_look_like_a_difference(tmp_path):
    """Its logits would round hidden states that agree to 1e-7 to other bfloat16 numbers."""
    model = converted("vanilla").to(torch.bfloat16)
    model.drafter.float()
    export(model, tmp_path / "out", quiet=True)
    report = check(tmp_path / "out", model, contexts=tuple(range(1, 33)))
    blocks = [fact for fact in report.facts if fact.name == "block"]
    assert len(blocks) == 32
    assert all(fact.verdict == "same" and float(fact.does) < 1e-4 for fact in blocks)


def test_the_last_line_sums_up(exports, tmp_path, capsys):
    report = check(exports("vanilla"), target_of(), quiet=False)
    unknown = sum(fact.verdict == "unknown" for fact in report.facts)
    agree = f"ok: {len(report.facts) - unknown} facts agree" + (f", {unknown} not known" if unknown else "")
    assert report.summary() == agree
    assert capsys.readouterr().err.splitlines()[-1] == agree
    source = exports("vanilla")
    one = check(changed(source, tmp_path / "one", nested(target_layer_ids=[2, 3, 4])), target_of())
    assert one.summary().startswith("1 fact disagrees: taps")
    several = dataclasses.replace(
        report, facts=(*one.facts, dataclasses.replace(one.facts[0], name="x", verdict="fails"))
    )
    assert several.summary().startswith("2 facts disagree: taps, x")


def test_another_target_of_the_same_sizes_gives_a_warning(exports):
    directory = exports("vanilla")
    report = check(directory, tiny("llama"), dynamic=False)
    assert report.ok
    assert not report.warnings
    report = check(directory, tiny("llama", seed=1), dynamic=False)
    assert report.ok
    assert report.summary().endswith(", 1 warning")
    assert "whose embedding is not that of LlamaForCausalLM" in report.to_dict()["warnings"][0]
    assert not check(directory, dynamic=False).warnings
