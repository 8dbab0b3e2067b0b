import json
from pathlib import Path

import pytest

from tests.golden.scheduling_cases import check_golden

DATA = Path(__file__).parents[1] / "golden" / "data"


@pytest.mark.parametrize(("name", "rows"), [("scheduler_prefix", 204), ("sts_calibration", 11)])
def test_reference_cases_are_reproduced(name, rows):
    checked = check_golden(json.loads((DATA / f"{name}.json").read_text()))
    assert [row for row in checked if not row.ok] == []
    assert len(checked) == rows


def test_a_wrong_case_is_seen():
    case = json.loads((DATA / "scheduler_prefix.json").read_text())
    case["cases"][2]["early_stop"]["lengths"][0] += 1
    assert [row.name for row in check_golden(case) if not row.ok] == [
        "smooth.early_stop.lengths",
        "smooth.early_stop.reference.lengths",
    ]
    with pytest.raises(ValueError, match="drafter"):
        check_golden({"kind": "drafter"})
