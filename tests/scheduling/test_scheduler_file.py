import dataclasses
import json

import pytest
import torch

from modelopt_spec.errors import CheckpointError, ConfigError
from modelopt_spec.scheduling.calibrate import calibrate_rounds, calibration_section
from modelopt_spec.scheduling.calibration import CalibrationOptions
from modelopt_spec.scheduling.cost import CostProfile, CostTable
from modelopt_spec.scheduling.engine_tables import read_engine_cost, read_sts
from modelopt_spec.scheduling.export import fold_shared_temperature, write_engine_files
from modelopt_spec.scheduling.scheduler_file import (
    CalibrationSection,
    Identity,
    PolicySection,
    SchedulerFile,
    current_hardware,
    load_scheduler,
    save_scheduler,
)
from tests.scheduling.synthetic import memory_bound_cost, round_table

HERE = Identity(
    model="org/target",
    drafter_fingerprint="d1",
    tokenizer_fingerprint="t1",
    hardware="gpu x1",
    engine="mtsp",
    engine_version="0.1",
    dtype="bfloat16",
)
CALIBRATION = CalibrationSection(
    (1.5, 2.0, 0.5), 1.4, (0.8, 0.7, 0.6), (0.1, 0.1, 0.1), (0.02, 0.02, 0.02), 900, "chat"
)


def make(**changes):
    values = {"gamma": 3, "identity": HERE, "calibration": CALIBRATION, "cost": memory_bound_cost()}
    return SchedulerFile(**(values | changes))


@pytest.mark.parametrize(
    "file",
    [
        make(sampling_temperature=0.7),
        make(calibration=None, cost=CostTable((1, 8), (10.0, 5.0))),
        make(cost=CostProfile((10, 90), (memory_bound_cost(), memory_bound_cost(8)))),
        SchedulerFile(5, policy=PolicySection("early_stop", survival_floor=1e-6, max_batch_tokens=64)),
    ],
)
def test_what_is_saved_is_loaded(file, tmp_path):
    assert save_scheduler(tmp_path, file) == tmp_path / "scheduler.json"
    assert load_scheduler(tmp_path, gamma=file.gamma, here=HERE) == file
    assert load_scheduler(tmp_path / "scheduler.json") == file


def test_report_to_file_to_scheduler(tmp_path):
    report = calibrate_rounds(round_table(), options=CalibrationOptions(bootstrap=0))
    save_scheduler(tmp_path, make(gamma=4, calibration=calibration_section(report)))
    scheduler = load_scheduler(tmp_path).scheduler(use_prior=True)
    assert scheduler.temperatures.tolist() == report["temperatures"]
    assert scheduler.prior.tolist() == report["prior"]
    assert scheduler.lengths(torch.zeros(3, 4)).shape == (3,)
    assert (make().scheduler().prior == 1.0).all()


def test_policy_settings_reach_the_scheduler():
    policy = PolicySection("global_stale", "stale", 3, 0.01, 128, True)
    scheduler = make(policy=policy).scheduler()
    assert (scheduler.allocation, scheduler.delay, scheduler.padded) == ("stale", 3, True)
    assert (scheduler.survival_floor, scheduler.max_batch_tokens) == (0.01, 128)
    with pytest.raises(ConfigError, match="has no cost table"):
        make(cost=None).scheduler()


def test_another_gamma_is_refused(tmp_path):
    save_scheduler(tmp_path, make())
    with pytest.raises(CheckpointError, match="is for gamma 3, this drafter drafts 5"):
        load_scheduler(tmp_path, gamma=5)


@pytest.mark.parametrize("name", ["model", "drafter_fingerprint", "tokenizer_fingerprint"])
def test_another_model_is_refused(tmp_path, name):
    save_scheduler(tmp_path, make())
    with pytest.raises(CheckpointError, match=f"another model \\({name}: file '.*', here 'other'"):
        load_scheduler(tmp_path, here=dataclasses.replace(HERE, **{name: "other"}), other_machine="drop_cost")


@pytest.mark.parametrize("name", ["hardware", "engine", "engine_version", "dtype"])
def test_another_machine_is_refused_or_loses_its_cost(tmp_path, name):
    save_scheduler(tmp_path, make())
    elsewhere = dataclasses.replace(HERE, **{name: "other"})
    with pytest.raises(CheckpointError, match=f"measured elsewhere \\({name}"):
        load_scheduler(tmp_path, here=elsewhere)
    kept = load_scheduler(tmp_path, here=elsewhere, other_machine="drop_cost")
    assert kept == make(cost=None)
    save_scheduler(tmp_path, make(cost=None))
    assert load_scheduler(tmp_path, here=elsewhere) == make(cost=None)


def test_unknown_fields_are_not_compared(tmp_path):
    save_scheduler(tmp_path, make(identity=Identity(model="org/target")))
    assert load_scheduler(tmp_path, here=HERE).gamma == 3


def rewrite(path, change, *, honest):
    """Edit the file; honest also renews its fingerprint."""
    from modelopt_spec.scheduling.engine_tables import canonical_sha256

    data = json.loads(path.read_text())
    change(data)
    if honest:
        del data["fingerprint"]
        data["fingerprint"] = canonical_sha256(data)
    path.write_text(json.dumps(data))


def test_an_edited_file_is_refused(tmp_path):
    path = save_scheduler(tmp_path, make())
    rewrite(path, lambda data: data["calibration"]["temperatures"].__setitem__(0, 9.0), honest=False)
    with pytest.raises(CheckpointError, match="edited or damaged"):
        load_scheduler(path)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d["calibration"].update(temperatures=[1.0, -1.0, 1.0]), ConfigError, "positive and finite"),
        (lambda d: d["calibration"].update(temperatures=[1.0, float("nan"), 1.0]), ConfigError, "positive and finite"),
        (lambda d: d["calibration"].update(temperatures=[1.0]), ConfigError, "1 entries"),
        (lambda d: d["calibration"].update(prior=[0.5]), ConfigError, "prior has 1 entries"),
        (lambda d: d["calibration"].update(shared_temperature=0.0), ConfigError, "positive and finite"),
        (lambda d: d["calibration"].pop("temperatures"), CheckpointError, "CalibrationSection is incomplete"),
        (lambda d: d["cost"].update(token_probes=[], theta_seconds=[]), ConfigError, "token_probes is empty"),
        (lambda d: d["policy"].update(delays=1), CheckpointError, "unknown key 'delays'.*Did you mean 'delay'"),
        (lambda d: d.update(gamma=0), ConfigError, "gamma is 0"),
        (lambda d: d.update(sampling_temperature=-0.5), ConfigError, "sampling_temperature is -0.5"),
        (lambda d: d.update(version=2), CheckpointError, "version 2"),
        (lambda d: d.update(kind="other"), CheckpointError, "no scheduler file"),
        (lambda d: d.pop("cost"), CheckpointError, r"lacks \['cost'\]"),
    ],
)
def test_wrong_content_is_named(tmp_path, change, error, message):
    path = save_scheduler(tmp_path, make())
    rewrite(path, change, honest=True)
    with pytest.raises(error, match=message):
        load_scheduler(path)


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_scheduler(tmp_path)
    (tmp_path / "scheduler.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        load_scheduler(tmp_path)
    with pytest.raises(ValueError, match="prior"):
        save_scheduler(tmp_path, make(calibration=dataclasses.replace(CALIBRATION, prior=(float("nan"),) * 3)))


def test_this_machine_has_a_name():
    assert len(current_hardware()) > 5


def test_engine_files_and_launch_lines(tmp_path):
    written = write_engine_files(tmp_path, make(), target="org/target", draft="draft-dir")
    assert read_sts(written.files["sglang_sts"], gamma=3).temperatures == CALIBRATION.temperatures
    for key in ("sglang_sps", "tensorrt_llm_sps"):
        read = read_engine_cost(written.files[key])
        assert read.identity["drafter_fingerprint"] == "d1"
        assert read.cost.step_seconds(4, 64) == pytest.approx(memory_bound_cost().step_seconds(4, 64))
    line = written.launch["sglang"]
    assert "SGLANG_RAGGED_VERIFY_MODE=compact" in line
    assert "--speculative-num-draft-tokens 4" in line
    assert f"--speculative-dspark-sps-table-path {written.files['sglang_sps']}" in line
    assert f"--speculative-dspark-confidence-sts-path {written.files['sglang_sts']}" in line
    assert "confidence_verify_len_tiers: [1, 2, 3]" in written.launch["tensorrt_llm"]
    assert f"confidence_sps_table_path: {written.files['tensorrt_llm_sps']}" in written.launch["tensorrt_llm"]
    vllm = json.loads(written.launch["vllm"].split("--speculative-config ")[1].strip("'"))
    assert vllm == {
        "method": "dspark",
        "model": "draft-dir",
        "num_speculative_tokens": 3,
        "enable_adaptive_verification": True,
    }


def test_a_staircase_stays_one_axis_and_gaps_are_said(tmp_path):
    stairs = CostTable((1, 8), (10.0, 5.0))
    written = write_engine_files(tmp_path, make(cost=stairs, calibration=None))
    assert read_engine_cost(written.files["sglang_sps"]).cost == stairs
    assert "sglang_sts" not in written.files
    assert any("no calibration" in note for note in written.notes)
    written = write_engine_files(tmp_path, make(cost=None))
    assert "sps-table-path" not in written.launch["sglang"]
    assert any("no cost table" in note for note in written.notes)
    with pytest.raises(ConfigError, match="nothing to write"):
        write_engine_files(tmp_path, make(cost=None, calibration=None))


@pytest.mark.parametrize("bias", [True, False])
def test_folded_temperature_divides_the_logits(bias):
    layer = torch.nn.Linear(6, 1, bias=bias)
    state = {f"confidence_head.proj.{name}": value for name, value in layer.state_dict().items()}
    folded = fold_shared_temperature(state | {"norm.weight": torch.ones(2)}, 1.7)
    other = torch.nn.Linear(6, 1, bias=bias)
    other.load_state_dict({name.rsplit(".", 1)[1]: v for name, v in folded.items() if "confidence" in name})
    x = torch.randn(5, 6)
    assert torch.allclose(other(x), layer(x) / 1.7, atol=1e-6)
    assert torch.equal(folded["norm.weight"], torch.ones(2))
    with pytest.raises(CheckpointError, match="no confidence_head"):
        fold_shared_temperature({"norm.weight": torch.ones(2)}, 1.7)
    for temperature in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="must be positive"):
            fold_shared_temperature(state, temperature)
