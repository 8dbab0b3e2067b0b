"""Scheduler parameters that travel with an export."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from modelopt_spec.checkpoints.export import export
from modelopt_spec.checkpoints.importing import load_drafter
from modelopt_spec.checkpoints.store import save
from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.scheduling import api
from modelopt_spec.scheduling.calibration import survival
from modelopt_spec.scheduling.engine_tables import read_engine_cost, read_sts
from modelopt_spec.scheduling.export import fold_shared_temperature, write_engine_files
from modelopt_spec.scheduling.policies import PrefixScheduler
from modelopt_spec.scheduling.scheduler_file import CalibrationSection, SchedulerFile, load_scheduler, save_scheduler
from tests.checkpoints.drafts import converted
from tests.scheduling.synthetic import memory_bound_cost
from tests.tiny import tiny

ENGINES = ["vllm", "sglang", "tensorrt_llm", "llama.cpp"]


@pytest.fixture(scope="module")
def model():
    return converted("vanilla")


@pytest.fixture
def scheduler(model, tmp_path):
    """A calibrated and profiled drafter's file."""
    gamma = model.drafter.num_draft_tokens
    temperatures = tuple(0.8 + 0.1 * k for k in range(gamma))
    calibration = CalibrationSection(
        temperatures, 1.6, (0.5,) * gamma, (0.2,) * gamma, (0.1,) * gamma, 900, "chat", 0.0
    )
    file = SchedulerFile(gamma, api.identity_of(model), calibration=calibration, cost=memory_bound_cost())
    return save_scheduler(tmp_path / "scheduler.json", file)


def test_an_export_carries_everything(model, scheduler, tmp_path):
    report = export(model, tmp_path / "draft", engines=ENGINES, scheduler=scheduler, quiet=True)
    out = tmp_path / "draft"
    file, before = load_scheduler(out), load_scheduler(scheduler)
    assert (file.calibration, file.cost, file.policy) == (before.calibration, before.cost, before.policy)
    sts = read_sts(out / "scheduler_sglang_sts.json", gamma=file.gamma)
    assert sts.temperatures == file.calibration.temperatures
    want = file.cost.step_seconds(4, 12)
    for name in ("scheduler_sglang_sps.json", "scheduler_tensorrt_llm_sps.json"):
        assert read_engine_cost(out / name).cost.step_seconds(4, 12) == pytest.approx(want, rel=1e-6)
    assert f"--speculative-dspark-sps-table-path {out}/scheduler_sglang_sps.json" in report.launch["sglang"]
    assert f"confidence_sts_path: {out}/scheduler_sglang_sts.json" in report.launch["tensorrt_llm"]
    assert f"confidence_sps_table_path: {out}/scheduler_tensorrt_llm_sps.json" in report.launch["tensorrt_llm"]
    settings = json.loads(report.launch["vllm"].split("--speculative-config '")[1].removesuffix("'"))
    assert settings["enable_adaptive_verification"] is True
    assert "partial" not in "".join(report.launch.values())
    assert report.launch["tensorrt_llm"].count("{") == report.launch["tensorrt_llm"].count("}")
    card = json.loads((out / "drafter_card.json").read_text())
    for name in ("scheduler.json", "scheduler_sglang_sts.json", "scheduler_sglang_sps.json"):
        assert card["files"][name] == sha256_of(out / name)
        assert name in report.files
    assert any("fold" in note for note in report.notes)


def test_a_checkpoint_takes_its_scheduler_file_along(model, scheduler, tmp_path):
    save(model, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "scheduler.json").write_bytes(scheduler.read_bytes())
    export(tmp_path / "checkpoint", tmp_path / "draft", quiet=True)
    assert load_scheduler(tmp_path / "draft") == load_scheduler(scheduler)


def test_folding_calibrates_the_raw_sigmoid_and_keeps_the_other_files_right(model, scheduler, tmp_path):
    export(model, tmp_path / "draft", scheduler=scheduler, fold_temperature=True, quiet=True)
    before, after = load_scheduler(scheduler).calibration, load_scheduler(tmp_path / "draft").calibration
    folded = load_drafter(tmp_path / "draft", tiny("llama"), quiet=True)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, before and len(before.temperatures), 32, generator=generator)
    previous = torch.randint(0, 90, hidden.shape[:2], generator=generator)
    raw, divided = (m.drafter.confidence(hidden, previous).detach().double().numpy() for m in (model, folded))
    assert divided == pytest.approx(raw / before.shared_temperature, rel=1e-4, abs=1e-6)
    assert after.shared_temperature == 1.0
    assert survival(divided, after.temperatures) == pytest.approx(survival(raw, before.temperatures), rel=1e-4)
    sts = read_sts(tmp_path / "draft" / "scheduler_sglang_sts.json")
    assert sts.temperatures == pytest.approx(after.temperatures)
    known = load_scheduler(tmp_path / "draft").identity
    assert known.drafter_fingerprint == api.identity_of(folded).drafter_fingerprint


def test_the_dtype_of_the_calibration_decides_what_is_compared(model, scheduler, tmp_path):
    """Calibrated in bfloat16, stored in float32: the same drafter."""
    served = copy.deepcopy(model)
    save(served, tmp_path / "checkpoint")
    served.to(torch.bfloat16)
    file = dataclasses.replace(load_scheduler(scheduler), identity=api.identity_of(served))
    save_scheduler(tmp_path / "bf16.json", file)
    export(tmp_path / "checkpoint", tmp_path / "draft", scheduler=tmp_path / "bf16.json", quiet=True)
    assert load_scheduler(tmp_path / "draft").identity == file.identity


def test_wrong_files_stop_the_export(model, scheduler, tmp_path):
    other = dataclasses.replace(load_scheduler(scheduler).identity, drafter_fingerprint="0" * 64)
    stranger = save_scheduler(tmp_path / "s.json", dataclasses.replace(load_scheduler(scheduler), identity=other))
    with pytest.raises(CheckpointError, match="belongs to another drafter"):
        export(model, tmp_path / "draft", scheduler=stranger, quiet=True)
    calibration = dataclasses.replace(load_scheduler(scheduler).calibration, temperatures=(1.0,), prior=(0.5,))
    shorter = dataclasses.replace(load_scheduler(scheduler), gamma=1, calibration=calibration)
    save_scheduler(tmp_path / "g.json", shorter)
    with pytest.raises(CheckpointError, match="is for gamma 1"):
        export(model, tmp_path / "draft", scheduler=tmp_path / "g.json", quiet=True)
    with pytest.raises(ConfigError, match="needs a scheduler file"):
        export(model, tmp_path / "draft", fold_temperature=True, quiet=True)
    uncalibrated = dataclasses.replace(load_scheduler(scheduler), calibration=None)
    save_scheduler(tmp_path / "u.json", uncalibrated)
    with pytest.raises(ConfigError, match="no calibration"):
        export(model, tmp_path / "draft", scheduler=tmp_path / "u.json", fold_temperature=True, quiet=True)
    assert not (tmp_path / "draft").exists()


def test_methods_without_a_scheduler_keep_their_launch_line(tmp_path):
    headless = converted("dflash_bonus")
    file = SchedulerFile(headless.drafter.num_draft_tokens, api.identity_of(headless), cost=memory_bound_cost())
    save_scheduler(tmp_path / "s.json", file)
    plain = export(headless, tmp_path / "a", quiet=True)
    report = export(headless, tmp_path / "b", scheduler=tmp_path / "s.json", quiet=True)
    assert report.launch == {name: line.replace("/a", "/b") for name, line in plain.launch.items()}


@pytest.mark.parametrize("fold", [False, True])
def test_an_offset_goes_into_the_bias(model, scheduler, tmp_path, fold):
    """The engines' files cannot say it, so the layer of every export with one has it."""
    before = dataclasses.replace(load_scheduler(scheduler).calibration, offset=-1.25)
    path = save_scheduler(tmp_path / "o.json", dataclasses.replace(load_scheduler(scheduler), calibration=before))
    with pytest.raises(ConfigError, match="has an offset"):
        write_engine_files(tmp_path, load_scheduler(path))
    export(model, tmp_path / "draft", scheduler=path, fold_temperature=fold, quiet=True)
    after = load_scheduler(tmp_path / "draft").calibration
    assert after.offset == 0.0
    shared = before.shared_temperature if fold else 1.0
    ours, theirs = (
        m.drafter.state_dict()["confidence_head.proj.bias"]
        for m in (model, load_drafter(tmp_path / "draft", tiny("llama"), quiet=True))
    )
    assert theirs == pytest.approx((ours + before.offset) / shared, rel=1e-5)
    z = np.linspace(-3, 3, len(before.temperatures))[None]
    want = PrefixScheduler(memory_bound_cost(), z.shape[1], temperatures=before.temperatures, offset=before.offset)
    got = PrefixScheduler(memory_bound_cost(), z.shape[1], temperatures=after.temperatures, offset=after.offset)
    assert got._confidence((z + before.offset) / shared) == pytest.approx(want._confidence(z))
    with pytest.raises(CheckpointError, match="no bias"):
        fold_shared_temperature({"confidence_head.proj.weight": torch.ones(1, 3)}, 1.0, 0.5)
