"""One drafter step (forward and backward, cached features, float32, one thread) of every head: against the floor of its
needed multiplications, and against nvidia-modelopt, and speculators and SpecForge where they are installed, in the same
process. `make bench` runs it.

Peers are interleaved with ours, repetition by repetition; times are CPU seconds, figures are medians. Writes JSON and a
figure.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from benchmarks.optional_peers import OPTIONAL_PEERS, installed
from benchmarks.peers import modelopt_step
from benchmarks.step_sizes import Step, StepSizes, needed_flops, peak_bytes, sgemm_rate
from modelopt_spec.config import LossConfig
from modelopt_spec.conversion import MODES
from modelopt_spec.drafter.drafter import build_drafter
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.base import TargetShape
from modelopt_spec.training.blocks import make_blocks, sample_anchors, valid_anchors
from modelopt_spec.training.loss import LossWeights, Projection, draft_loss, gather_rows
from modelopt_spec.training.module import block_settings
from modelopt_spec.versions import versions

MODE_OF = {"none": "dflash", "vanilla": "dspark", "gated": "dspark", "rnn": "dspark", "gru": "domino"}
ANCHORS, SEQS, VOCABS = (32, 64, 128, 256), (512, 1024, 2048), (32000, 151936)
LOSS_OF = {
    "none": LossWeights(ce=1.0),
    "gru": LossWeights(ce=0.6, base_ce=0.4),
    **{head: LossWeights(ce=0.1, tv=0.9, confidence=1.0) for head in ("vanilla", "gated", "rnn")},
}


class CachedTarget:
    """A target of which only the embedding and the output projection are left."""

    def __init__(self, sizes: StepSizes) -> None:
        self.embedding = torch.randn(sizes.vocab, sizes.hidden) * 0.02
        self.weight = torch.randn(sizes.vocab, sizes.hidden) * 0.02
        self.shape = TargetShape(
            "bench", sizes.hidden, sizes.vocab, 8, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate, 1e-6
        )

    def embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]."""
        return self.embedding[ids]

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V]."""
        return hidden @ self.weight.T

    def output_weight(self) -> Tensor:
        """[V, D]."""
        return self.weight


def make_inputs(sizes: StepSizes) -> dict[str, Tensor]:
    """One fully supervised row and its cached features."""
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.randint(3, sizes.vocab - 1, (1, sizes.seq), generator=generator),
        "loss_mask": torch.ones(1, sizes.seq, dtype=torch.bool),
        "taps": torch.randn(1, sizes.seq, sizes.taps * sizes.hidden, generator=generator),
        "last_hidden": torch.randn(1, sizes.seq, sizes.hidden, generator=generator),
    }


def our_step(head: str, sizes: StepSizes, inputs: dict[str, Tensor]) -> tuple[Step, dict[str, int]]:
    """One step of this package as a function, and the counts that its floor is made of."""
    torch.manual_seed(0)
    config = MODES[MODE_OF[head]](
        block_size=sizes.block,
        target_layer_ids=(2, 5),
        mask_token_id=sizes.vocab - 1,
        vocab_size=sizes.vocab,
        target_hidden_size=sizes.hidden,
        num_target_layers=8,
        head={"type": head, "rank": sizes.rank},
        backbone={
            "num_layers": sizes.layers,
            "hidden_size": sizes.hidden,
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "intermediate_size": sizes.intermediate,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    )
    drafter = build_drafter(config)
    drafter.bind(CachedTarget(sizes))
    weights = LOSS_OF[head]
    settings = block_settings(drafter, LossConfig(), sizes.anchors)
    anchors, keep = sample_anchors(
        valid_anchors(inputs["loss_mask"])[:, : sizes.seq], sizes.anchors, torch.Generator().manual_seed(0)
    )
    features = TargetFeatures(inputs["taps"], inputs["last_hidden"])

    def work() -> None:
        blocks = make_blocks(inputs["input_ids"], inputs["loss_mask"], anchors, keep, settings)
        output = drafter(features, blocks)
        rows = gather_rows(output, blocks, features.last_hidden if weights.needs_target else None)
        draft_loss(rows, Projection.of(drafter), weights, None).loss.backward()

    blocks = make_blocks(inputs["input_ids"], inputs["loss_mask"], anchors, keep, settings)
    positions = blocks.target_positions[blocks.supervised].unique().numel() if weights.needs_target else 0
    counts = {
        "slots": int(blocks.supervised.sum()),
        "positions": positions,
        "context_pairs": int(anchors.sum()) * sizes.block,
    }
    return Step(drafter, work), counts


@dataclass(frozen=True)
class Spent:
    """What one step took."""

    seconds: float
    """CPU time, the system's included."""
    system_seconds: float
    """The system's part: on Linux nearly all of it clears pages that are touched for the first time."""
    touched_mib: float
    """Pages touched for the first time since the system gave them."""


def spent_by(step: Callable[[], None]) -> Spent:
    before = resource.getrusage(resource.RUSAGE_SELF)
    step()
    after = resource.getrusage(resource.RUSAGE_SELF)
    system = after.ru_stime - before.ru_stime
    faults = after.ru_minflt - before.ru_minflt
    return Spent(after.ru_utime - before.ru_utime + system, system, faults * resource.getpagesize() / 2**20)


PEERS: dict[str, Callable[[str, StepSizes, dict[str, Tensor]], Step | None]] = {
    "modelopt": modelopt_step,
    **OPTIONAL_PEERS,
}


def measure(head: str, sizes: StepSizes, repeats: int, peers: Sequence[str]) -> dict[str, Any]:
    """Medians of interleaved repetitions, and peak bytes of one step each."""
    inputs = make_inputs(sizes)
    ours, counts = our_step(head, sizes, inputs)
    steps = {"ours": ours}
    for name in peers:
        step = PEERS[name](head, sizes, inputs)
        if step is not None:
            steps[name] = step
    spent: dict[str, list[Spent]] = {name: [] for name in steps}
    floors: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    flops = needed_flops(sizes, head, **counts)
    for _ in range(repeats):
        for name, step in steps.items():
            floors[name].append(flops / sgemm_rate())
            spent[name].append(spent_by(step))

    def over(name: str, part: str = "seconds") -> list[float]:
        return [getattr(one, part) / floor for one, floor in zip(spent[name], floors[name], strict=True)]

    peak = {name: peak_bytes(step) / 2**20 for name, step in steps.items()}
    others = [name for name in steps if name != "ours"]
    return {
        "head": head,
        "sizes": asdict(sizes),
        **counts,
        "gflop": flops / 1e9,
        "floor_seconds": statistics.median(floors["ours"]),
        "over_floor": {name: statistics.median(over(name)) for name in steps},
        "system_over_floor": {name: statistics.median(over(name, "system_seconds")) for name in steps},
        "touched_mib": {name: statistics.median(one.touched_mib for one in values) for name, values in spent.items()},
        "peak_mib": peak,
        "time_ratio": {
            name: statistics.median(a / b for a, b in zip(over("ours"), over(name), strict=True)) for name in others
        },
        "peak_ratio": {name: peak["ours"] / peak[name] for name in others},
    }


def sweep(heads: list[str], size: str, named: Sequence[str] = ()) -> list[tuple[str, StepSizes]]:
    """Heads and sizes. quick: N 64; axes: each of N, S and V varied alone; full: all combinations.

    ``named`` sizes ("N,S,V") take the place of all of these.
    """
    base = StepSizes()
    points = [base]
    if size == "axes":
        points = [replace(base, anchors=n) for n in ANCHORS] + [replace(base, seq=s) for s in SEQS[1:]]
        points.append(replace(base, vocab=VOCABS[1]))
    if size == "full":
        points = [replace(base, anchors=n, seq=s, vocab=v) for v in VOCABS for s in SEQS for n in ANCHORS]
    if named:
        numbers = [[int(number) for number in name.split(",")] for name in named]
        points = [replace(base, anchors=n, seq=s, vocab=v) for n, s, v in numbers]
    return [(head, sizes) for sizes in points for head in heads]


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of time over the floor, ours beside the peers'."""
    labels = [f"{r['head']}\nN{r['sizes']['anchors']} S{r['sizes']['seq']} V{r['sizes']['vocab']}" for r in results]
    figure, axes = plt.subplots(figsize=(max(6, 0.9 * len(results)), 4), layout="constrained")
    places = range(len(results))
    names = ["ours", *PEERS]
    names = [name for name in names if any(name in result["over_floor"] for result in results)]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        heights = [result["over_floor"].get(name, 0.0) for result in results]
        label = "modelopt-spec" if name == "ours" else name
        axes.bar([place + (number + 0.5) * width - 0.4 for place in places], heights, width, label=label)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(ylabel="time over the matmul floor", xticks=list(places))
    axes.set_xticklabels(labels, fontsize=7)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="none,vanilla,gated,rnn,gru")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sweep", choices=["quick", "axes", "full"], default="axes", help="quick: N 64 only")
    parser.add_argument("--size", action="append", default=[], help="N,S,V to measure instead of a sweep; repeatable")
    parser.add_argument("--resume", action="store_true", help="keep what the output file holds and measure the rest")
    parser.add_argument("--peers", help="modelopt, speculators, specforge; default: modelopt, and what is installed")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    found = ["modelopt", *filter(installed, OPTIONAL_PEERS)]
    peers = found if options.peers is None else [name for name in options.peers.split(",") if name]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "train_step.json"
    results: list[dict[str, Any]] = json.loads(file.read_text())["results"] if options.resume and file.exists() else []
    done = [(result["head"], result["sizes"]) for result in results]
    for head, sizes in sweep(options.heads.split(","), options.sweep, options.size):
        if (head, asdict(sizes)) in done:
            continue
        result = measure(head, sizes, options.repeats, peers)
        results.append(result)
        over, peak = result["over_floor"], result["peak_mib"]
        line = f"{head:8} N {sizes.anchors:3} S {sizes.seq:4} V {sizes.vocab:6}  over floor {over['ours']:.2f}"
        line += f"  peak {peak['ours']:.0f} MiB"
        for name, ratio in result["time_ratio"].items():
            line += f"  {name} {over[name]:.2f} = time {ratio:.2f}, peak {result['peak_ratio'][name]:.2f}"
        print(line, flush=True)
        summary = {"versions": versions(), "repeats": options.repeats, "results": results}
        file.write_text(json.dumps(summary, indent=1) + "\n")
    draw(results, options.out / "train_step.png")


if __name__ == "__main__":
    main()
