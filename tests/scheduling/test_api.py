"""Calibrate, profile and simulate on a tiny model and files."""

import dataclasses
import io
import json

import pytest
import torch
from rich.console import Console

from modelopt_spec.decoding.evaluate import evaluate
from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.rounds import rounds_header, write_rounds
from modelopt_spec.errors import CheckpointError, ConfigError, UnsupportedError
from modelopt_spec.reports import scheduling as figures
from modelopt_spec.scheduling import api
from modelopt_spec.scheduling.cost import AdditiveCostTable
from modelopt_spec.scheduling.model_steps import ModelSteps
from modelopt_spec.scheduling.policies import FixedLength, PrefixScheduler
from modelopt_spec.scheduling.rounds import rounds_from_records
from modelopt_spec.scheduling.scheduler_file import SchedulerFile, load_scheduler, save_scheduler
from tests.decoding.tiny import add_drafter, tiny_target
from tests.scheduling.synthetic import memory_bound_cost, round_records


class Tokenizer:
    is_fast = False
    name_or_path = "somewhere/tiny-tokenizer"

    def get_vocab(self):
        return {"a": 0, "b": 1}


@pytest.fixture(scope="module")
def model():
    return add_drafter(tiny_target())


@pytest.fixture
def rounds(tmp_path):
    """Rounds whose gamma is the tiny drafter's."""
    header, records = round_records(gamma=5)
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [header, *records]) + "\n")
    return path


def test_calibrate_then_profile_complete_one_file(model, rounds, tmp_path):
    out = tmp_path / "scheduler.json"
    report = api.calibrate(
        model, Tokenizer(), ["data/chat.jsonl"], rounds=rounds, out=out, bootstrap=0, temperature=0.7, max_noise=0.2
    )
    assert report["dataset"] == "chat"
    half = load_scheduler(out)
    assert half.cost is None
    assert half.sampling_temperature == 0.7
    timed = api.profile(model, Tokenizer(), out=out, requests=[1, 2], contexts=[8], repeats=3, warmup=1, check=False)
    whole = load_scheduler(out, gamma=5, here=api.identity_of(model, Tokenizer()))
    assert whole.calibration == half.calibration
    assert isinstance(whole.cost, AdditiveCostTable)
    assert whole.policy.padded
    assert whole.scheduler().lengths(torch.zeros(2, 5)).shape == (2,)
    assert {cell["tokens"] for cell in timed["measurements"]["cells"]} == {1, 2, 3, 4, 5, 6, 8, 10, 12}
    again = api.calibrate(model, Tokenizer(), [], rounds=rounds, out=out, bootstrap=0, max_noise=0.2)
    assert load_scheduler(out).cost == whole.cost
    text = io.StringIO()
    figures.print_calibration(again, Console(file=text, width=200))
    figures.print_profile(timed, Console(file=text, width=200))
    assert "mean ECE of survival" in text.getvalue()
    assert "the fit is off by at most" in text.getvalue()
    figures.draw_reliability(again, tmp_path / "reliability.png")
    assert (tmp_path / "reliability_ece.png").is_file()


def test_a_file_of_another_drafter_is_not_overwritten(model, rounds, tmp_path):
    other = dataclasses.replace(api.identity_of(model), drafter_fingerprint="other")
    save_scheduler(tmp_path / "scheduler.json", SchedulerFile(5, other))
    with pytest.raises(CheckpointError, match="belongs to another model"):
        api.calibrate(model, Tokenizer(), [], rounds=rounds, out=tmp_path, bootstrap=0, max_noise=0.2)


def test_identity_follows_the_weights(model):
    identity = api.identity_of(model, Tokenizer())
    assert (identity.tokenizer, identity.dtype, identity.engine) == ("tiny-tokenizer", "float32", "modelopt-spec")
    other = add_drafter(tiny_target(), seed=2)
    assert api.identity_of(other).drafter_fingerprint != identity.drafter_fingerprint
    with pytest.raises(CheckpointError, match="has no drafter"):
        api.identity_of(torch.nn.Linear(1, 1))


def test_calibrate_collects_rounds_without_a_scheduler(model, tmp_path, monkeypatch):
    seen = {}

    def collect(model, tokenizer, prompts, path, options):
        seen.update(options, path=path)
        header, records = round_records(gamma=5)
        path.write_text("\n".join(json.dumps(row) for row in [header, *records]) + "\n")

    monkeypatch.setattr(api, "_collect", collect)
    kept = tmp_path / "kept.jsonl"
    report = api.calibrate(
        model,
        Tokenizer(),
        ["a.jsonl", "b.jsonl"],
        rounds_out=kept,
        temperature=0.5,
        limit=7,
        bootstrap=0,
        max_noise=0.2,
    )
    assert report["dataset"] == "a, b"
    assert (seen["temperatures"], seen["limit"], seen["path"]) == ((0.5,), 7, kept)
    assert kept.is_file()
    assert "scheduler_file" not in report


def test_simulate_from_files(model, rounds, tmp_path):
    out = tmp_path / "scheduler.json"
    api.calibrate(model, Tokenizer(), [], rounds=rounds, out=out, bootstrap=0, max_noise=0.2)
    with pytest.raises(ConfigError, match="no cost table"):
        api.simulate(rounds, scheduler=out, loads=[1])
    save_scheduler(out, dataclasses.replace(load_scheduler(out), cost=memory_bound_cost()))
    report = api.simulate(rounds, scheduler=out, loads=[1, 32], requests=64)
    assert not report["engine"]["padded"]
    measured = tmp_path / "measured.json"
    point = report["policies"][3]["points"][1]
    measured.write_text(
        json.dumps({"points": [{"policy": "scheduler", "load": 32, "throughput": point["throughput_all"]}]})
    )
    compared = api.simulate(rounds, scheduler=out, loads=[1, 32], requests=64, measured=measured)
    assert compared["comparison"][0]["relative_error"] == pytest.approx(0.0, abs=1e-9)
    padded = api.simulate(rounds, scheduler=out, loads=[32], requests=64, padded=True)
    assert padded["policies"][3]["points"][0]["throughput"] < point["throughput"]
    text = io.StringIO()
    figures.print_simulation(compared, Console(file=text, width=200))
    assert "measured tokens/s" in text.getvalue()


def test_steps_leave_the_model_and_the_context_alone(model):
    model.train()
    steps = ModelSteps(model)
    with steps.running():
        assert not model.training
        for _ in range(2):
            steps.step(2, 6, 9)
            steps.draft(2, 9)
            steps.plain(1, 9)
        batch = steps._batch(2, 9)
        assert batch.session.cache.lengths.tolist() == [9, 9]
        assert batch.drafting.cache.lengths.tolist() == [9, 9]
        with pytest.raises(ConfigError, match="this decoding pads"):
            steps.step(2, 5, 9)
        with pytest.raises(ConfigError, match="this decoding pads"):
            steps.step(2, 16, 9)
    assert model.training
    model.eval()


def test_a_step_is_what_a_decoding_round_does(model):
    """The copied rows give the logits that a real prefill of each row gives."""
    steps = ModelSteps(model, 3)
    with steps.running():
        batch = steps._batch(3, 7)
        hidden = batch.session.verify(batch.tokens).hidden
        assert steps.gamma == 3
        generator = torch.Generator().manual_seed(0)
        context = torch.randint(0, model.config.vocab_size, (1, 7), generator=generator)
        rows = torch.cat([context.expand(3, -1), batch.tokens], dim=1)
        want = model.model(rows).last_hidden_state[:, 7:]
        assert torch.allclose(hidden, want, atol=1e-5)


def test_states_that_cannot_be_cut_back_are_refused(model, monkeypatch):
    monkeypatch.setattr("modelopt_spec.scheduling.model_steps.open_session", lambda *a: object())
    steps = ModelSteps(model)
    with steps.running(), pytest.raises(UnsupportedError, match="cannot be cut back"):
        steps.step(1, 2, 5)
    with pytest.raises(ConfigError, match="has no drafter"):
        ModelSteps(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("padded", [False, True])
def test_generate_takes_our_policies_and_stays_greedy(model, padded, tmp_path):
    prompts = torch.randint(1, 60, (4, 6), generator=torch.Generator().manual_seed(3))
    plain = generate(model, prompts, max_new_tokens=24, eos_token_id=None)
    cost = AdditiveCostTable(0.01, (1, 4), (0.0, 0.002), (1, 6, 24), (0.0, 0.001, 0.1))
    scheduler = PrefixScheduler(cost, 5, padded=padded)
    scheduled = generate(model, prompts, max_new_tokens=24, eos_token_id=None, scheduler=scheduler)
    assert torch.equal(plain.sequences, scheduled.sequences)
    assert len({record.verified for record in scheduled.rounds}) > 1
    assert scheduler._history._row == {}
    fixed = generate(model, prompts, max_new_tokens=24, eos_token_id=None, scheduler=FixedLength(5, 1))
    assert torch.equal(plain.sequences, fixed.sequences)
    assert max(record.verified for record in fixed.rounds) == 1
    path = write_rounds(tmp_path / "r.jsonl", rounds_header(5), plain.rounds)
    report = api.simulate(path, _saved(cost, tmp_path), loads=[2], policies=["fixed"], requests=4, extrapolate=True)
    assert report["policies"][0]["points"][0]["tokens"] > 0


def _saved(cost, tmp_path):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(cost.to_dict()))
    return path


def test_a_scheduler_file_is_checked_where_it_is_used(model, tmp_path):
    """generate and evaluate take a path: another drafter, tokenizer, machine or gamma is an error."""
    prompts = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(3))
    cost = AdditiveCostTable(0.01, (1, 4), (0.0, 0.002), (1, 6, 24), (0.0, 0.001, 0.1))
    mine = SchedulerFile(5, api.identity_of(model, Tokenizer()), cost=cost)
    path = save_scheduler(tmp_path / "scheduler.json", mine)
    plain = generate(model, prompts, max_new_tokens=12, eos_token_id=None)
    scheduled = generate(model, prompts, max_new_tokens=12, eos_token_id=None, scheduler=str(path))
    assert torch.equal(plain.sequences, scheduled.sequences)
    policy = api.open_policy(path, model, Tokenizer(), gamma=5)
    assert isinstance(policy, PrefixScheduler)
    assert api.open_policy(policy, model, gamma=5) is policy
    with pytest.raises(CheckpointError, match="is for gamma 5, this drafter drafts 3"):
        generate(model, prompts, max_new_tokens=4, num_draft_tokens=3, scheduler=path)
    for change, message in (
        ({"drafter_fingerprint": "other"}, "another model"),
        ({"tokenizer_fingerprint": "other"}, "another model"),
        ({"hardware": "another machine"}, "measured elsewhere"),
        ({"engine": "sglang"}, "measured elsewhere"),
        ({"dtype": "bfloat16"}, "measured elsewhere"),
    ):
        identity = dataclasses.replace(mine.identity, **change)
        stranger = save_scheduler(tmp_path / "other.json", dataclasses.replace(mine, identity=identity))
        with pytest.raises(CheckpointError, match=message):
            generate(model, prompts, max_new_tokens=4, scheduler=stranger, tokenizer=Tokenizer())
        questions = tmp_path / "prompts.jsonl"
        questions.write_text('{"turns": ["a"]}\n')
        with pytest.raises(CheckpointError, match=message):
            evaluate(model, Tokenizer(), questions, scheduler=stranger)
    empty = save_scheduler(tmp_path / "empty.json", SchedulerFile(5, mine.identity))
    with pytest.raises(ConfigError, match="no cost table"):
        generate(model, prompts, max_new_tokens=4, scheduler=empty)


def test_rounds_of_another_drafter_are_refused(model, tmp_path):
    header, records = round_records(gamma=5)
    mine = rounds_from_records(
        header | {"drafter_fingerprint": api.identity_of(model).drafter_fingerprint, "temperature": 0.3}, records
    )
    out = tmp_path / "scheduler.json"
    options = {"bootstrap": 0, "max_noise": 0.2}
    api.calibrate(model, Tokenizer(), [], rounds=mine, out=out, **options)
    assert load_scheduler(out).sampling_temperature == 0.3
    theirs = rounds_from_records(header | {"drafter_fingerprint": "other"}, records)
    with pytest.raises(CheckpointError, match="recorded with another drafter"):
        api.calibrate(model, Tokenizer(), [], rounds=theirs, **options)
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [theirs.header, *records]) + "\n")
    with pytest.raises(CheckpointError, match="recorded with another drafter"):
        api.simulate(path, _saved(memory_bound_cost(), tmp_path), scheduler=out, loads=[1])
