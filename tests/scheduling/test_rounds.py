import json

import numpy as np
import pytest

from modelopt_spec.decoding.rounds import RoundRecord, rounds_header, write_rounds
from modelopt_spec.errors import DataError
from modelopt_spec.scheduling.rounds import read_rounds, rounds_from_records
from tests.scheduling.synthetic import round_records


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_what_decoding_writes_can_be_read(tmp_path):
    full = RoundRecord(0, 1, 7, (5, 6, 7), 3, 2, 3, 0.0, 7, (0.1, 0.2, 0.3))
    short = RoundRecord(0, 0, 4, (5, 6, 7), 1, 1, 2, 0.0, 4, (1.0, 2.0, 3.0))
    path = write_rounds(tmp_path / "rounds.jsonl", rounds_header(3, model="m"), [full, short])
    table = read_rounds(path)
    assert table.header["model"] == "m"
    assert table.position.tolist() == [4, 7]
    assert table.verified.tolist() == [1, 3]
    assert table.accept_prefix()[1].tolist() == [True, True, False]
    assert len(table.full_blocks()) == 1
    assert table.full_blocks().confidence_logits.tolist() == [[0.1, 0.2, 0.3]]
    assert table.accepted_length() == 3.0


def test_short_blocks_are_padded_and_left_out():
    header, records = round_records(gamma=3, prompts=1, rounds=2)
    records[1] |= {"drafted": [1], "accepted": 0, "confidence_logits": [0.5]}
    table = rounds_from_records(header, records)
    assert np.isnan(table.confidence_logits[1]).tolist() == [False, True, True]
    assert len(table.calibration_rounds()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": 5}, "accepted 5, verified 4, drafted 4"),
        ({"verified": 9}, "verified 9"),
        ({"drafted": [1] * 6}, "gamma is 4"),
        ({"confidence_logits": [0.0]}, "1 confidence_logits for 4"),
        ({"confidence_logits": [0.0, float("nan"), 0.0, 0.0]}, "NaN"),
    ],
)
def test_wrong_rounds_are_named(change, message):
    header, records = round_records(prompts=1, rounds=2)
    records[1] |= change
    with pytest.raises(DataError, match="round 2.*" + message):
        rounds_from_records(header, records)


def test_wrong_files_are_named(tmp_path):
    header, records = round_records(prompts=1, rounds=1)
    with pytest.raises(DataError, match="does not exist"):
        read_rounds(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match="is empty"):
        read_rounds(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="no round header"):
        read_rounds(write(tmp_path / "headless.jsonl", records))
    with pytest.raises(DataError, match="holds no round"):
        read_rounds(write(tmp_path / "only_header.jsonl", [header]))
    with pytest.raises(DataError, match="version is 2"):
        read_rounds(write(tmp_path / "later.jsonl", [header | {"version": 2}, *records]))
    with pytest.raises(DataError, match="gamma is None"):
        read_rounds(write(tmp_path / "no_gamma.jsonl", [header | {"gamma": None}, *records]))
    cut = tmp_path / "cut.jsonl"
    cut.write_text(json.dumps(header) + "\n" + json.dumps(records[0])[:20])
    with pytest.raises(DataError, match=":2 is not JSON"):
        read_rounds(cut)


def test_no_full_block_is_an_error():
    header, records = round_records(prompts=1, rounds=2)
    for row in records:
        row |= {"verified": 1, "accepted": 0}
    with pytest.raises(DataError, match="none of 2 rounds verified a full block"):
        rounds_from_records(header, records).calibration_rounds()
