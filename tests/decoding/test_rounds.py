"""Round files: what is written is read back, here and by the scheduling room."""

from __future__ import annotations

import json

import pytest
import torch

from modelopt_spec.decoding.decode_loop import DecodeLoop
from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.rounds import RoundRecord, read_rounds, rounds_header, write_rounds
from modelopt_spec.decoding.sampling import Sampling, probabilities
from modelopt_spec.errors import DataError
from modelopt_spec.scheduling.rounds import read_rounds as read_table
from tests.decoding.oracle import propose
from tests.decoding.tiny import add_drafter, tiny_target


@pytest.fixture(scope="module")
def recorded():
    """Rounds of two rows with confidences and probabilities."""
    model = tiny_target()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    truth = model.generate(ids, max_new_tokens=20, do_sample=False).tolist()
    propose(add_drafter(model), truth, wrong_share=0.3)
    return model, ids, generate(model, ids, max_new_tokens=20, record_probabilities=True)


def test_round_trip(recorded, tmp_path):
    _, _, result = recorded
    header = rounds_header(5, model="tiny", temperature=0.0, prompts={"files": []})
    path = write_rounds(tmp_path / "deep" / "rounds.jsonl", header, result.rounds)
    assert [file.name for file in path.parent.iterdir()] == ["rounds.jsonl"]
    assert read_rounds(path) == (header, list(result.rounds))
    first = json.loads(path.read_text().splitlines()[1])
    assert set(first) >= {
        "prompt", "round", "position", "drafted", "accepted", "committed", "confidence_logits", "accept_prob",
        "temperature", "context_tokens",
    }  # fmt: skip


def test_the_scheduling_room_reads_them(recorded, tmp_path):
    _, _, result = recorded
    table = read_table(write_rounds(tmp_path / "r.jsonl", rounds_header(5), result.rounds))
    assert len(table) == len(result.rounds)
    full = [r for r in result.rounds if len(r.drafted) == r.verified == 5]
    assert table.full_blocks().accepted.mean() == sum(r.accepted for r in full) / len(full)
    assert table.calibration_rounds().confidence_logits.shape == (len(full), 5)


def test_records_say_what_happened(recorded):
    _, ids, result = recorded
    for row, output in enumerate(result.outputs):
        position = ids.shape[1]
        for record in (r for r in result.rounds if r.prompt == row):
            assert record.position == record.context_tokens == position
            committed = output[position - ids.shape[1] + 1 :][: record.committed]
            assert record.drafted[: record.accepted] == committed[: record.accepted]
            if record.accepted < record.verified:
                assert record.drafted[record.accepted] != committed[record.accepted]
            position += record.committed


def test_acceptance_probabilities_are_those_of_the_distributions(recorded):
    model, ids, result = recorded
    record = next(r for r in result.rounds if r.prompt == 1 and r.verified == 5)
    sequence = [*ids[1].tolist(), *result.outputs[1]][: record.position + 1]
    with torch.no_grad():
        logits = model(torch.tensor([[*sequence, *record.drafted]])).logits[0, record.position :]
    p = probabilities(logits[:5], Sampling(1.0))
    # the scripted draft is sure of its token, so min(p, q) sums to p of that token
    want = [float(p[k, token]) for k, token in enumerate(record.drafted)]
    assert record.accept_prob == pytest.approx(want, abs=1e-4)
    assert record.draft_prob == pytest.approx([1.0] * 5, abs=1e-6)


def test_sampled_rounds_record_their_own_distributions():
    model = add_drafter(tiny_target(), "rnn")
    result = generate(
        model, torch.tensor([[5, 6, 7]]), max_new_tokens=12, temperature=0.8, top_k=9, seed=1, record_probabilities=True
    )
    for record in result.rounds:
        if record.verified:
            assert all(0 <= chance <= 1 + 1e-6 for chance in record.accept_prob)
            assert all(0 < chance <= 1 + 1e-6 for chance in record.draft_prob)
    quiet = generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=12, temperature=0.8, top_k=9, seed=1)
    assert quiet.outputs == result.outputs
    assert all(record.accept_prob is None for record in quiet.rounds)
    none = generate(model, torch.tensor([[5, 6, 7]]), max_new_tokens=12, return_rounds=False)
    assert none.rounds == ()


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], "empty"),
        (['{"kind": "other", "version": 1}'], "kind 'other'"),
        (['{"kind": "mtsp.rounds", "version": 2}'], "version 2"),
        (['{"kind": "mtsp.rounds", "version": 1}', '{"prompt": 0'], ":2 is not a round"),
        (['{"kind": "mtsp.rounds", "version": 1}', '{"prompt": 0}'], "KeyError"),
        (["[1]"], ":1 is not"),
    ],
)
def test_bad_files_are_named_by_line(lines: list[str], named: str, tmp_path):
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=named):
        read_rounds(path)


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_rounds(tmp_path / "none.jsonl")


def test_older_files_without_verified_counts():
    row = {"prompt": 0, "round": 0, "position": 3, "drafted": [1, 2], "accepted": 1, "committed": 2}
    record = RoundRecord.from_json({**row, "temperature": 0, "context_tokens": 3, "confidence_logits": None})
    assert record.verified == 2


def test_recorded_rounds_do_not_hold_on_to_distributions(monkeypatch):
    """They are draft tokens times vocabulary a round: gigabytes for a long sampled answer."""
    model, ids = add_drafter(tiny_target()), torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    held = []
    records = DecodeLoop.records

    def look(self):
        held.extend(self._rounds)
        return records(self)

    monkeypatch.setattr(DecodeLoop, "records", look)
    generate(model, ids, max_new_tokens=12, do_sample=True, top_k=0, seed=0, record_probabilities=True)
    assert len(held) > 1
    assert all(item.block is None or item.block.probabilities is None for item in held)
