"""One draft round of every reference decoder."""

from __future__ import annotations

import pytest

from tests.golden.decode_cases import check_decode_case
from tests.golden.runner import DATA, check_file, load_case

CASES = sorted(DATA.glob("*_decode_*.json"))


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_golden(file):
    rows = check_file(file)
    assert len(rows) >= 32
    assert [row for row in rows if not row.ok] == []


def test_every_kind_of_decoder_is_there():
    assert {file.stem for file in CASES} >= {
        "deepspec_decode_dflash",
        "deepspec_decode_gated",
        "deepspec_decode_rnn",
        "deepspec_decode_vanilla",
        "specforge_decode_domino",
        "specforge_decode_domino_unshifted",
        "zlab_decode_bonus_anchor",
    }


def test_the_comparison_can_fail():
    case, tensors = load_case(DATA / "deepspec_decode_rnn.json")
    tensors["markov_head.joint_proj.bias"] = tensors["markov_head.joint_proj.bias"] + 0.01
    off = {row.name.split()[1] for row in check_decode_case(case, tensors, "float32") if not row.ok}
    assert "out.draft_logits" in off
    assert "out.base_logits" not in off
