"""How each engine reads a directory: every rule that its parser or loader has, one test each."""

import copy
from pathlib import Path

import pytest
import torch

from modelopt_spec.checkpoints.engines import ENGINES, Serving, get_engine
from modelopt_spec.checkpoints.engines.base import Directory, qwen3_view
from modelopt_spec.checkpoints.layouts import LAYOUTS, get_layout
from modelopt_spec.checkpoints.safe_read import TensorEntry
from modelopt_spec.checkpoints.target_facts import TargetFacts
from modelopt_spec.errors import UnsupportedError
from tests.checkpoints.drafts import cached_draft

PLAIN = TargetFacts(known=True)


def directory(case="vanilla", layout="deepspec", change=lambda c: None, names=lambda names: names):
    """What a written directory holds, without writing it."""
    draft = cached_draft(case)
    written = get_layout(layout)
    config = copy.deepcopy(written.write_config(draft.config))
    change(config)
    tensors = written.write_tensors(draft)
    entries = {n: TensorEntry(n, "F32", tuple(t.shape), Path("x")) for n, t in tensors.items()}
    return Directory(
        config, {name: entries.get(name, TensorEntry(name, "F32", (1,), Path("x"))) for name in names(entries)}
    )


def drop(*keys):
    def change(config):
        for key in keys:
            place, _, name = key.rpartition(".")
            (config[place] if place else config).pop(name, None)

    return change


def put(**values):
    return lambda config: config.update(values)


def nest(**values):
    return lambda config: config["dflash_config"].update(values)


def together(*changes):
    def change(config):
        for one in changes:
            one(config)

    return change


DOES = [
    # engine, case, layout, change, fact, what it does
    # vLLM
    ("vllm", "vanilla", "deepspec", nest(target_layer_ids=[0, 1]), "taps", (0, 1)),
    ("vllm", "vanilla", "deepspec", put(eagle_aux_hidden_state_layer_ids=[0, 4]), "taps", (-1, 3)),
    ("vllm", "vanilla", "deepspec", drop("dflash_config"), "taps", (1, 2, 3)),
    ("vllm", "vanilla", "deepspec", nest(mask_token_id=7), "mask token", 7),
    ("vllm", "vanilla", "deepspec", drop("dflash_config.mask_token_id"), "mask token", 96),
    ("vllm", "vanilla", "deepspec", drop("sample_from_anchor"), "anchor layout", "anchor_first"),
    ("vllm", "vanilla", "speculators", drop("sample_from_anchor"), "anchor layout", "bonus_anchor"),
    ("vllm", "vanilla", "deepspec", drop("enable_confidence_head"), "confidence head", False),
    ("vllm", "vanilla", "deepspec", drop("confidence_head_with_markov"), "confidence input", "hidden"),
    ("vllm", "vanilla", "deepspec", put(markov_head_type="gated"), "head", "vanilla"),
    ("vllm", "vanilla", "deepspec", put(is_causal=True), "causality", True),
    ("vllm", "vanilla", "deepspec", together(drop("is_causal"), nest(causal=True)), "causality", True),
    ("vllm", "window", "deepspec", together(drop("is_causal", "dflash_config.causal")), "causality", True),
    ("vllm", "vanilla", "deepspec", nest(use_swa=True, swa_window_size=4), "window", 4),
    ("vllm", "window", "deepspec", drop("dflash_config.swa_window_size"), "window", 9),
    (
        "vllm",
        "window",
        "deepspec",
        together(drop("dflash_config.swa_window_size"), put(use_sliding_window=False)),
        "window",
        None,
    ),
    ("vllm", "dflash_bonus", "zlab", lambda c: None, "anchor layout", "bonus_anchor"),
    ("vllm", "dflash_bonus", "speculators", put(sliding_window_non_causal=False), "causality", False),
    (
        "vllm",
        "dflash_bonus",
        "speculators",
        together(put(sliding_window_non_causal=False), drop("transformer_layer_config.is_causal")),
        "causality",
        True,
    ),
    ("vllm", "vanilla", "deepspec", put(logit_scale=0.5), "logit scale", 0.5),
    ("vllm", "sink", "zlab", drop("dflash_config.attention_sink_bias"), "attention sink", False),
    # SGLang
    ("sglang", "vanilla", "deepspec", nest(target_layer_ids=[0, 1]), "taps", (0, 1)),
    ("sglang", "vanilla", "deepspec", nest(block_size=9), "block size", 9),
    ("sglang", "vanilla", "deepspec", drop("confidence_head_with_markov"), "confidence input", "hidden and token"),
    ("sglang", "vanilla", "deepspec", put(enable_confidence_head=False), "confidence head", True),
    ("sglang", "window", "deepspec", drop("is_causal"), "causality", True),
    ("sglang", "vanilla", "deepspec", nest(causal=True), "causality", False),
    ("sglang", "vanilla", "deepspec", nest(use_swa=True, swa_window_size=4), "window", None),
    ("sglang", "vanilla", "deepspec", put(partial_rotary_factor=0.5), "rotated share", 0.5),
    ("sglang", "dflash_bonus", "zlab", nest(final_logit_softcapping=30.0), "logit soft-cap", 30.0),
    ("sglang", "dflash_bonus", "zlab", nest(output_multiplier=0.5), "logit scale", 0.5),
    ("sglang", "vanilla", "modelopt", lambda c: None, "head", "none"),
    ("sglang", "vanilla", "modelopt", lambda c: None, "anchor layout", "bonus_anchor"),
    ("sglang", "domino", "domino", nest(shift_label=False), "anchor layout", "bonus_anchor"),
    ("sglang", "domino", "domino", drop("dflash_config.emb_dim"), "head rank", 6),
    # TensorRT-LLM
    ("tensorrt_llm", "vanilla", "deepspec", put(dspark_config={"mask_token_id": 4}), "mask token", 4),
    ("tensorrt_llm", "vanilla", "deepspec", nest(markov_rank=3), "head rank", 3),
    (
        "tensorrt_llm",
        "vanilla",
        "deepspec",
        together(drop("dflash_config"), put(dspark_block_size=3)),
        "block size",
        3,
    ),
    (
        "tensorrt_llm",
        "vanilla",
        "deepspec",
        drop("dflash_config", "sample_from_anchor"),
        "anchor layout",
        "anchor_first",
    ),
    ("tensorrt_llm", "vanilla", "speculators", lambda c: None, "taps", (1, 2, 3)),
    # llama.cpp
    ("llama.cpp", "vanilla", "deepspec", nest(mask_token_id=7), "mask token", 7),
    ("llama.cpp", "vanilla", "deepspec", drop("dflash_config"), "mask token", 96),
    ("llama.cpp", "vanilla", "deepspec", drop("sample_from_anchor"), "anchor layout", "anchor_first"),
    ("llama.cpp", "vanilla", "speculators", drop("sample_from_anchor"), "anchor layout", "bonus_anchor"),
    ("llama.cpp", "dflash_bonus", "zlab", drop("block_size"), "block size", 16),
    ("llama.cpp", "vanilla", "deepspec", put(markov_rank=99), "head rank", 6),
    ("llama.cpp", "vanilla", "deepspec", put(enable_confidence_head=False), "confidence head", True),
    ("llama.cpp", "window", "deepspec", together(put(use_sliding_window=False), nest(use_swa=False)), "window", None),
    ("llama.cpp", "window", "deepspec", drop("is_causal", "dflash_config.causal"), "causality", False),
    ("llama.cpp", "vanilla", "deepspec", nest(input_embedding_scale=5.0), "embedding scale", 5.0),
    ("llama.cpp", "vanilla", "deepspec", nest(final_logit_softcapping=30.0), "logit soft-cap", 30.0),
]


@pytest.mark.parametrize(("engine", "case", "layout", "change", "fact", "value"), DOES)
def test_reads(engine, case, layout, change, fact, value):
    view = ENGINES[engine].reads(directory(case, layout, change), PLAIN)
    assert view.does[fact] == value


def with_tensor(name):
    return lambda names: [*names, name]


def without_tensor(part):
    return lambda names: [name for name in names if part not in name]


FAILS = [
    # engine, case, layout, change, names, fact
    ("vllm", "vanilla", "deepspec", drop("markov_rank"), list, "head rank"),
    ("vllm", "vanilla", "deepspec", together(nest(markov_rank=6), drop("markov_rank")), list, "head rank"),
    ("vllm", "gated", "deepspec", lambda c: None, list, "head"),
    ("vllm", "rnn", "deepspec", lambda c: None, list, "head"),
    ("vllm", "vanilla", "deepspec", put(architectures=["DominoDraftModel"]), list, "head"),
    ("vllm", "dflash_bonus", "zlab", nest(sample_from_anchor=True), list, "anchor layout"),
    ("vllm", "vanilla", "deepspec", nest(sample_from_anchor=True), list, "anchor layout"),
    ("vllm", "reduced", "deepspec", lambda c: None, without_tensor("d2t"), "d2t"),
    ("vllm", "reduced", "deepspec", lambda c: None, without_tensor("lm_head"), "draft vocabulary"),
    ("vllm", "vanilla", "speculators", drop("aux_hidden_state_layer_ids"), list, "taps"),
    ("vllm", "dflash", "deepspec", lambda c: None, list, "head rank"),
    ("sglang", "vanilla", "deepspec", nest(target_layer_ids=[-1, 2]), list, "taps"),
    ("sglang", "vanilla", "deepspec", put(markov_rank=0), list, "head rank"),
    ("sglang", "vanilla", "deepspec", together(nest(markov_rank=6), drop("markov_rank")), list, "head rank"),
    ("sglang", "vanilla", "deepspec", put(markov_head_type="transformer"), list, "head"),
    ("sglang", "vanilla", "deepspec", drop("markov_head_type"), list, "head"),
    ("sglang", "reduced", "deepspec", lambda c: None, list, "draft vocabulary"),
    ("sglang", "window", "deepspec", put(use_sliding_window=False), list, "window"),
    ("sglang", "domino", "specforge_domino", lambda c: None, list, "head"),
    ("sglang", "domino", "domino", drop("dflash_config.shift_label"), list, "anchor layout"),
    ("sglang", "domino", "domino", nest(pure_draft_prefix_len=2), list, "pure prefix"),
    ("sglang", "domino", "domino", put(emb_dim=9), list, "head rank"),
    ("tensorrt_llm", "gated", "deepspec", lambda c: None, list, "head"),
    ("llama.cpp", "gated", "deepspec", lambda c: None, list, "head"),
    ("llama.cpp", "domino", "specforge_domino", lambda c: None, list, "head"),
    ("llama.cpp", "dflash_bonus", "speculators", lambda c: None, list, "head"),
    ("llama.cpp", "llama3", "deepspec", lambda c: None, list, "rope scaling"),
    ("llama.cpp", "reduced", "deepspec", lambda c: None, without_tensor("d2t"), "d2t"),
    ("llama.cpp", "vanilla", "deepspec", lambda c: None, without_tensor("markov"), "confidence head"),
    ("llama.cpp", "vanilla", "deepspec", lambda c: None, without_tensor("confidence_head"), "confidence head"),
]


@pytest.mark.parametrize(("engine", "case", "layout", "change", "names", "fact"), FAILS)
def test_fails(engine, case, layout, change, names, fact):
    assert fact in ENGINES[engine].reads(directory(case, layout, change, names), PLAIN).fails


def test_written_directories_satisfy_every_rule_of_their_engines():
    for name, engine in ENGINES.items():
        for case in (
            "vanilla",
            "vanilla_bonus",
            "gated",
            "rnn",
            "dflash",
            "dflash_bonus",
            "domino",
            "reduced",
            "window",
        ):
            draft = cached_draft(case)
            for layout in LAYOUTS.values():
                dtype = torch.bfloat16 if case == "domino" else torch.float32
                serving = Serving(draft.config, layout.name, dtype)
                if layout.refuses(draft.config) is None and engine.refuses(serving) is None:
                    assert engine.reads(directory(case, layout.name), PLAIN).fails == {}, (name, case, layout.name)


def test_missing_sizes_fall_back_to_the_class_defaults():
    keys = directory().config
    assert qwen3_view(keys)["shape"] == (3, 32, 4, 2, 8, 48)
    without = {k: v for k, v in keys.items() if k not in ("head_dim", "num_key_value_heads")}
    assert qwen3_view(without)["shape"] == (3, 32, 4, 32, 128, 48)


def test_rope_scaling_overrides_rope_parameters():
    keys = dict(directory().config)
    keys["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    view = qwen3_view(keys)
    assert view["rope scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert view["rope base"] == 10000.0
    assert keys["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}, "the config itself must not change"


@pytest.mark.parametrize(
    ("engine", "case", "target", "message"),
    [
        ("vllm", "vanilla", TargetFacts(embedding_scale=5.7, known=True), "raw embedding rows"),
        ("vllm", "vanilla", TargetFacts(logit_softcapping=30.0, known=True), "soft-cap"),
        ("vllm", "vanilla", TargetFacts(logit_scale=0.5, known=True), "does not scale"),
        ("vllm", "dflash_bonus", TargetFacts(logit_softcapping=30.0, known=True), None),
        ("sglang", "vanilla", TargetFacts(embedding_scale=3.0, embedding_multiplier=3.0, known=True), "multiplier"),
        ("sglang", "vanilla", TargetFacts(embedding_scale=5.7, known=True), None),
        ("sglang", "vanilla", TargetFacts(logit_softcapping=30.0, known=True), "caps nor scales"),
        ("tensorrt_llm", "vanilla", TargetFacts(embedding_scale=5.7, known=True), "not known"),
        ("llama.cpp", "vanilla", TargetFacts(5.7, True, 5.7, 1.0, 30.0, 0.5), None),
    ],
)
def test_targets_that_scale(engine, case, target, message):
    layout = "zlab" if case == "dflash_bonus" else "deepspec"
    reason = ENGINES[engine].refuses(Serving(cached_draft(case).config, layout, torch.float32, target))
    assert (reason is None) if message is None else (message in (reason or ""))


def test_names_of_engines():
    assert get_engine("llama_cpp") is get_engine("LLAMA.CPP") is ENGINES["llama.cpp"]
    assert get_engine("TensorRT-LLM") is ENGINES["tensorrt_llm"]
    with pytest.raises(UnsupportedError, match=r"Did you mean 'sglang'"):
        get_engine("sgl")


@pytest.mark.parametrize(
    ("engine", "case", "layout", "parts"),
    [
        ("vllm", "vanilla", "deepspec", ['"method": "dspark"', '"num_speculative_tokens": 5', "V2_MODEL_RUNNER=1"]),
        ("vllm", "vanilla_bonus", "deepspec", ['"num_speculative_tokens": 4']),
        ("vllm", "dflash_bonus", "zlab", ['"method": "dflash"', '"num_speculative_tokens": 4']),
        ("sglang", "vanilla", "deepspec", ["DSPARK", "--speculative-num-draft-tokens 6"]),
        ("sglang", "vanilla_bonus", "deepspec", ["--speculative-dspark-block-size 4", "num-draft-tokens 5"]),
        ("sglang", "dflash_bonus", "zlab", ["DFLASH", "--speculative-num-draft-tokens 5"]),
        ("sglang", "domino", "domino", ["DFLASH", "--speculative-num-draft-tokens 5"]),
        ("tensorrt_llm", "vanilla", "deepspec", ["decoding_type: DSpark", "max_draft_len: 5"]),
        ("tensorrt_llm", "dflash_bonus", "zlab", ["decoding_type: DFlash", "max_draft_len: 4"]),
        ("llama.cpp", "vanilla", "deepspec", ["draft-dspark", "--spec-draft-n-max 5", "--target-model-dir TARGET"]),
        ("llama.cpp", "dflash_bonus", "zlab", ["draft-dflash", "--spec-draft-n-max 4"]),
    ],
)
def test_launch_lines(engine, case, layout, parts):
    line = ENGINES[engine].launch(cached_draft(case).config, layout, "TARGET", "DIR")
    assert all(part in line for part in [*parts, "TARGET", "DIR"]), line
