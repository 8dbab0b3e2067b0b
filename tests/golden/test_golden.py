"""Every golden case, of the repository and, where they are, of the project's shared folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.runner import DATA, check_file

SHARED = Path(__file__).parents[3] / "shared" / "golden"
CASES = [
    "deepseek_v4_layer",
    "deepspec_decode_dflash",
    "deepspec_decode_gated",
    "deepspec_decode_rnn",
    "deepspec_decode_vanilla",
    "deepspec_dflash",
    "deepspec_dspark_gated",
    "deepspec_dspark_rnn",
    "deepspec_dspark_vanilla",
    "mhc_hyper_connection",
    "mhc_hyper_connection_coarse",
    "scheduler_prefix",
    "specforge_decode_domino",
    "specforge_decode_domino_unshifted",
    "specforge_domino",
    "specforge_domino_unshifted",
    "sts_calibration",
    "zlab_decode_bonus_anchor",
    "zlab_dflash_bonus_anchor",
]


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    found = [folder / f"{name}.json" for folder in (DATA, SHARED) if (folder / f"{name}.json").is_file()]
    if not found:
        pytest.skip(f"golden case {name} is not part of the repository and no shared folder is beside it")
    rows = check_file(found[0])
    assert rows
    assert not [row for row in rows if not row.ok]
