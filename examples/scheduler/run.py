"""The scheduler on a real 135M model: calibrate, measure the machine, simulate serving, compare with the real thing.

    python examples/scheduler/run.py runs/demo/train/drafter --work runs/scheduler --out docs/results/scheduler

Stages can be run one by one (``--stage``). What is done is kept in the work directory and not done again, so a run that
was stopped goes on, and ``--minutes`` stops one between two pieces. Step times and throughput are in processor seconds
of one thread; a slice of the cost measurement comes before each repeat of the throughput, so that a machine that
changes under it changes both.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelopt_spec.checkpoints.opening import open_checkpoint
from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.decoding.evaluate import evaluate
from modelopt_spec.decoding.measure import end_tokens, numbered
from modelopt_spec.decoding.prompts import read_prompt_files
from modelopt_spec.reports import scheduling as reports
from modelopt_spec.scheduling import api
from modelopt_spec.scheduling.calibrate import calibrate_rounds, write_report
from modelopt_spec.scheduling.calibration import CalibrationOptions
from modelopt_spec.scheduling.cost import cost_from_dict
from modelopt_spec.scheduling.cost_fit import read_cells
from modelopt_spec.scheduling.cost_measure import CostMeasurements, measure_cost, pool_measurements
from modelopt_spec.scheduling.measured import ThroughputMeasurement, merge_measured
from modelopt_spec.scheduling.model_steps import ModelSteps
from modelopt_spec.scheduling.profile import fit_measurements
from modelopt_spec.scheduling.rounds import RoundTable, join_rounds, read_rounds
from modelopt_spec.scheduling.sweep import compare_measured, policy_from_name, simulate_loads

HERE = Path(__file__).parent
HELD_OUT = HERE.parent / "demo" / "data" / "heldout.jsonl"
LOADS = {1: 8, 2: 8, 4: 8, 8: 16, 16: 16}
"""Concurrent requests, and the prompts that they are measured on."""
POLICIES = ("none", "fixed", "threshold:0.3", "scheduler")
CONTEXTS = (64, 256)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Batch tokens of the cost table: 1, 2, 4 or 8 a request."""
NEW_TOKENS = 24
SETTINGS = {"greedy": (0.0, 100), "sampled": (1.0, 32)}
"""Sampling temperature, and the first held-out prompts that rounds are recorded of."""
CHUNK = 16


class Run:
    """One drafter, its work directory and its results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work, self.out = options, Path(options.work), Path(options.out)
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.started = time.time()

    @cached_property
    def model(self) -> tuple[Any, Any]:
        """Target with drafter, and tokenizer, as calibration records its rounds."""
        return self.open("bfloat16")

    @cached_property
    def served(self) -> tuple[Any, Any]:
        """The same for steps and throughput: in float32 a prompt has the same rounds in a batch of any size."""
        return self.open("float32")

    def open(self, dtype: str) -> tuple[Any, Any]:
        """Target with drafter, and tokenizer, in a type."""
        return open_checkpoint(self.options.checkpoint, self.options.target, dtype=dtype, device="cpu")

    def pause(self) -> None:
        """Stop here if the time is over; the next call goes on."""
        if self.options.minutes and time.time() - self.started > 60 * self.options.minutes:
            raise SystemExit("time is over: run the same command again to go on")

    def calibrate(self) -> None:
        """Rounds of all held-out prompts, greedy and sampled; a fit on some prompts, judged on the others."""
        for name, (temperature, _) in SETTINGS.items():
            table = self.all_rounds(name)
            report = api.calibrate(
                *self.model,
                [HELD_OUT],
                out=self.work / f"scheduler_{name}.json",
                rounds=table,
                temperature=temperature,
                held_out_share=0.4,
                folds=5,
                refine=True,
                offset=name == "sampled",
                bootstrap=100,
                min_events=0 if name == "sampled" else None,
            )
            report.pop("scheduler_file")
            write_report(report, self.out / f"calibration_{name}.json")
            reports.draw_reliability(report, self.out / f"reliability_{name}.png")
            print(name, reports.calibration_table(report), sep="\n")
        plain = CalibrationOptions(refine=True, bootstrap=0, min_events=0)
        alone = calibrate_rounds(self.all_rounds("sampled"), held_out_share=0.4, folds=5, options=plain)
        write_report(alone, self.out / "calibration_sampled_no_offset.json")

    def all_rounds(self, name: str) -> RoundTable:
        """Rounds of all prompts of a setting."""
        return join_rounds([self.rounds(name, first) for first in range(0, SETTINGS[name][1], CHUNK)])

    def rounds(self, name: str, first: int) -> RoundTable:
        """Rounds of the prompts from number ``first`` on, made once and kept."""
        path = self.work / f"rounds_{name}_{first}.jsonl"
        if not path.is_file():
            self.pause()
            prompts = self.work / f"prompts_{path.stem}.jsonl"
            lines = HELD_OUT.read_text(encoding="utf-8").splitlines()[first : first + CHUNK]
            prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.record(self.model, prompts, path, SETTINGS[name][0], 128, first)
        return read_rounds(path)

    def record(
        self, pair: tuple[Any, Any], prompts: Path, path: Path, temperature: float, new_tokens: int, seed: int = 0
    ) -> None:
        """Full-block rounds of an evaluation."""
        evaluate(
            *pair,
            [prompts],
            temperatures=(temperature,),
            max_new_tokens=new_tokens,
            batch_size=CHUNK,
            seed=seed,
            baseline=False,
            control=False,
            probabilities=False,
            rounds_out=path,
        )

    def measure(self) -> None:
        """Cost slices and throughput in turn, a slice first and last."""
        serving = self.work / "serving_rounds.jsonl"
        if not serving.is_file():
            prompts = self.work / "prompts_serving.jsonl"
            lines = HELD_OUT.read_text(encoding="utf-8").splitlines()[: max(LOADS.values())]
            prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
            self.record(self.served, prompts, serving, 0.0, NEW_TOKENS + 8)
            self.pause()
        for repeat in range(self.options.repeats):
            if not self.slice_path(repeat).is_file():
                self.measure_slice(repeat)
                self.pause()
            for load in LOADS:
                path = self.work / f"measured_{repeat}_{load}.json"
                if not path.is_file():
                    write_report(self.throughput(load), path)
                    self.pause()
        if not self.slice_path(self.options.repeats).is_file():
            self.measure_slice(self.options.repeats)

    def slice_path(self, index: int) -> Path:
        """File of one cost slice."""
        return self.work / f"cost_{index}.json"

    def measure_slice(self, index: int) -> None:
        """Three visits of every cell of the cost table."""
        steps = ModelSteps(self.served[0], seed=index)
        with steps.running():
            measured = measure_cost(
                steps.step,
                requests=list(LOADS),
                gamma=steps.gamma,
                contexts=CONTEXTS,
                tokens=TOKENS,
                draft_fn=steps.draft,
                repeats=3,
                warmup=1,
                uniform=True,
                clock=time.process_time,
                seed=index,
            )
        write_report(measured.to_dict(), self.slice_path(index))

    def policies(self, cost: Any) -> dict[str, Any]:
        """A maker of each policy."""
        temperatures = self.calibration()["temperatures"]
        settings = {"gamma": len(temperatures), "cost": cost, "temperatures": temperatures, "padded": True}
        return {name: partial(policy_from_name, name, **settings) for name in POLICIES}

    def calibration(self) -> dict[str, Any]:
        """The calibration report."""
        return json.loads((self.out / "calibration_greedy.json").read_text())

    def throughput(self, load: int) -> dict[str, Any]:
        """All policies once at one load; the scheduler decides by the first slice's table."""
        model, tokenizer = self.served
        renderer = ChatRenderer(tokenizer)
        dialogues = numbered(read_prompt_files([HELD_OUT], max(LOADS.values())))
        prompts = [dialogue.prompt(renderer, 0, []) for _, dialogue in dialogues]
        measurement = ThroughputMeasurement(model, prompts, NEW_TOKENS, end_tokens(model, tokenizer))
        cost = cost_from_dict(fit_measurements(self.slices()[0], check=False)["cost"])
        measurement.add(self.policies(cost), load, LOADS[load])
        return measurement.report()

    def slices(self) -> list[CostMeasurements]:
        """The cost slices so far."""
        found = []
        for path in sorted(self.work.glob("cost_*.json")):
            data = json.loads(path.read_text())
            cells = tuple(read_cells(data["cells"]))
            found.append(CostMeasurements(data["gamma"], data["repeats"], data["warmup"], cells, tuple(data["spread"])))
        return found

    def simulate(self) -> None:
        """Fit the pooled table, compare with what was measured, and draw the curves."""
        profile = fit_measurements(pool_measurements(self.slices()), check=not self.options.no_check)
        write_report(profile, self.out / "profile.json")
        reports.cost_figure(profile, self.out / "cost.png")
        cost = cost_from_dict(profile["cost"])
        self.compare(cost)
        table = self.all_rounds("greedy")
        common = {"temperatures": self.calibration()["temperatures"], "loads": list(LOADS)}
        policies = ("none", "fixed", "fixed:1", "fixed:2", "threshold:0.3", "scheduler")
        for name, padded in (("padded", True), ("ragged", False)):
            report = simulate_loads(table, cost, policies=policies, padded=padded, requests=96, **common)
            write_report(report, self.out / f"simulation_{name}.json")
            reports.throughput_figure(report, self.out / f"simulation_{name}.png")
            reports.load_figure(report, self.out / f"simulation_{name}_loads.png")
            print(name, reports.simulation_table(report), sep="\n")
        began = time.process_time()
        common["loads"] = [32, 128, 1024, 10000]
        report = simulate_loads(table, cost, policies=policies, extrapolate=True, output_tokens=64, **common)
        report["cpu_seconds"] = time.process_time() - began
        write_report(report, self.out / "simulation_extrapolated.json")
        reports.throughput_figure(report, self.out / "simulation_extrapolated.png")
        print("extrapolated", reports.simulation_table(report), f"{report['cpu_seconds']:.0f} s", sep="\n")

    def compare(self, cost: Any) -> None:
        """Simulated against measured throughput of drained batches."""
        files = sorted(self.work.glob("measured_*.json"))
        measured = merge_measured([json.loads(path.read_text()) for path in files])
        serving = read_rounds(self.work / "serving_rounds.jsonl")
        curves: dict[str, Any] = {}
        for load, count in LOADS.items():
            mine: RoundTable = serving.select(np.isin(serving.prompt, np.unique(serving.prompt)[:count]))
            report = simulate_loads(
                mine,
                cost,
                loads=[load],
                load="batch",
                policies=POLICIES,
                temperatures=self.calibration()["temperatures"],
                padded=True,
                max_output_tokens=NEW_TOKENS - 1,
            )
            for curve in report["policies"]:
                curves.setdefault(curve["name"], []).extend(curve["points"])
        simulated = report | {"policies": [{"name": name, "points": points} for name, points in curves.items()]}
        simulated["comparison"] = compare_measured(simulated, measured)
        write_report(measured, self.out / "measured.json")
        write_report(simulated, self.out / "comparison.json")
        reports.load_figure(simulated, self.out / "comparison.png", measured)
        print(reports.comparison_table(simulated["comparison"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--target", default=None, help="default: the one that the drafter was trained for")
    parser.add_argument("--work", type=Path, default=Path("runs/scheduler"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/scheduler"))
    parser.add_argument("--stage", choices=("calibrate", "measure", "simulate"), default=None, help="default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after this time; 0: never")
    parser.add_argument("--no-check", action="store_true", help="accept a flat or inert cost table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Run(options)
    for stage in ("calibrate", "measure", "simulate"):
        if options.stage in (None, stage):
            getattr(run, stage)()


if __name__ == "__main__":
    main()
