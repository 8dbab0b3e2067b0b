import json

import numpy as np
import pytest

from modelopt_spec.errors import ConfigError, DataError, UnsupportedError
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable
from modelopt_spec.scheduling.cost_fit import Cell
from modelopt_spec.scheduling.engine_tables import (
    StsFile,
    additive,
    canonical_sha256,
    one_axis,
    read_engine_cost,
    read_sts,
    sglang_one_axis,
    sglang_sts,
    sglang_two_axis,
    tensorrt_llm,
    tensorrt_llm_v2,
)
from modelopt_spec.scheduling.profile import read_cost

STAIRS = CostTable((1, 9, 17), (100.0, 80.0, 50.0))
SUM = AdditiveCostTable(0.01, (1, 4, 16), (0.0, 0.001, 0.004), (1, 32, 64), (0.0, 0.002, 0.03))
REQUESTS, TOKENS = (1, 3, 16, 99), (1, 8, 9, 16, 17, 40, 64, 200)


def write(path, data):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def same_times(one, two, rel=1e-12):
    for requests in REQUESTS:
        assert one.step_seconds(requests, TOKENS) == pytest.approx(two.step_seconds(requests, TOKENS), rel=rel)


def test_sts_both_ways(tmp_path):
    sts = StsFile((0.5, 2.0), "chat", 300, (0.1, 0.2), (0.05, 0.06), {"gamma": 2, "model": "m"})
    path = write(tmp_path / "sts.json", sglang_sts(sts))
    assert read_sts(path, gamma=2) == sts
    data = json.loads(path.read_text())
    assert set(data) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after", "mtsp"}
    renamed = write(tmp_path / "trt.json", {"sts_temperatures": [1.0, 3.0]})
    assert read_sts(renamed).temperatures == (1.0, 3.0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"temperatures": [1.0, 2.0, 3.0]}, "3 entries.*2 slots"),
        ({"temperatures": [1.0, -2.0]}, "positive and finite"),
        ('{"temperatures": [1.0, NaN]}', "positive and finite"),
        ({"temperatures": []}, "no temperatures"),
        ({"token_counts": [1]}, "no calibration file"),
        ("not json", "is not JSON"),
        ("[1]", "JSON object"),
    ],
)
def test_bad_sts_files_are_refused(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        read_sts(write(tmp_path / "sts.json", data), gamma=2)


def test_sglang_one_axis_both_ways(tmp_path):
    data = sglang_one_axis(STAIRS, max_batch_tokens=99, identity={"model": "m"})
    assert data["max_batch_tokens"] == 99
    assert "bias_seconds" not in json.dumps(data)
    read = read_engine_cost(write(tmp_path / "sps.json", data))
    assert (read.format, read.cost, read.identity) == ("sglang_one_axis", STAIRS, {"model": "m"})
    with pytest.raises(DataError, match="single knot"):
        sglang_one_axis(CostTable((1,), (1.0,)))
    with pytest.raises(UnsupportedError, match="two axes"):
        sglang_one_axis(CostTable((1, 2), (1.0, 0.5), "linear"))


def test_sglang_two_axis_both_ways(tmp_path):
    raised = AdditiveCostTable(0.0, (1, 16), (0.002, 0.004), (1, 64), (0.01, 0.03))
    data = sglang_two_axis(raised)
    assert data["bias_seconds"] > 0
    read = read_engine_cost(write(tmp_path / "sps.json", data))
    assert read.format == "sglang_two_axis"
    same_times(read.cost, raised)


def test_tensorrt_llm_both_ways(tmp_path):
    data = tensorrt_llm(SUM, identity={"gamma": 3})
    assert min(data["step_time_ms"]) > 0
    assert data["_meta"] == {"lookup": "interp", "engine": {"gamma": 3}}
    read = read_engine_cost(write(tmp_path / "trt.json", data))
    assert (read.format, read.identity) == ("tensorrt_llm", {"gamma": 3})
    same_times(read.cost, SUM)
    bare = {"token_counts": [1, 8], "step_time_ms": [10.0, 12.0], "fixed_overhead_ms": 1.0}
    assert read_engine_cost(write(tmp_path / "bare.json", bare)).cost.step_seconds(5, 8) == pytest.approx(0.013)


FINGERPRINT = {
    "gpu": "x",
    "gpu_count": 1,
    "gpu_snapshot_sha256": "0" * 64,
    "max_draft_len": 3,
    "rank_local_graph_batch_sizes": [1, 2],
    "runtime_snapshot": "r",
    "source_diff_sha256": "0" * 64,
    "source_head": "h",
    "topology": {},
}


def test_tensorrt_llm_schema_2(tmp_path):
    cells = [Cell(r, r * n, 0, float(SUM.step_seconds(r, r * n))) for r in (1, 2) for n in (1, 2, 4)]
    data = tensorrt_llm_v2(cells, gamma=3, engine_fingerprint=FINGERPRINT, source_sha256="a" * 64)
    assert data["cost_tables"]["2"]["token_counts"] == [2, 4, 8]
    assert data["engine_fingerprint_sha256"] == canonical_sha256(FINGERPRINT)
    assert {(m["rank_local_graph_batch_size"], m["rank_local_verifier_budget"]) for m in data["measurements"]} == {
        (c.requests, c.tokens) for c in cells
    }
    read = read_engine_cost(write(tmp_path / "v2.json", data))
    assert read.format == "tensorrt_llm_v2"
    assert read.identity == FINGERPRINT
    for cell in cells:
        assert read.cost.step_seconds(cell.requests, cell.tokens) == pytest.approx(cell.seconds, rel=1e-3)
    with pytest.raises(ConfigError, match="edited"):
        read_engine_cost(write(tmp_path / "v2.json", data | {"engine_fingerprint": {**FINGERPRINT, "gpu": "y"}}))
    with pytest.raises(ConfigError, match="schema_version 2"):
        read_engine_cost(write(tmp_path / "v2.json", data | {"schema_version": 3}))
    with pytest.raises(DataError, match="lack the full block of 8"):
        tensorrt_llm_v2(cells[:-1], gamma=3, engine_fingerprint=FINGERPRINT, source_sha256="a" * 64)
    with pytest.raises(ConfigError, match=r"lacks .*topology"):
        tensorrt_llm_v2(cells, gamma=3, engine_fingerprint={"gpu": "x"}, source_sha256="a" * 64)
    with pytest.raises(ConfigError, match="source_sha256"):
        tensorrt_llm_v2(cells, gamma=3, engine_fingerprint=FINGERPRINT, source_sha256="a")


def vllm_line(tables, prefix="(EngineCore pid=7) DEBUG 11-29 10:00:00 [v1/worker/.../adaptive_verification.py:254] "):
    """The engine's logger: str of the tuple, its prefix repeated on each line of the message."""
    message = f"DSpark cost tables: {tables}"
    return "INFO something else\n" + (prefix + message).replace("\n", "\r\n" + prefix) + "\nINFO later (unbalanced\n"


@pytest.mark.parametrize("colour", ["", "\x1b[37m"])
def test_vllm_log(tmp_path, colour):
    draft = np.linspace(0.0, 3.0, 40)
    verify = np.concatenate([[1e-6], np.linspace(9.0, 30.0, 300)])
    text = vllm_line(
        (draft, verify), prefix=f"{colour}(EngineCore pid=7) DEBUG\x1b[0m [a.py:1] " if colour else "P [x] "
    )
    read = read_engine_cost(write(tmp_path / "vllm.log", text))
    assert read.format == "vllm_log"
    assert read.cost.step_seconds(5, 8) == pytest.approx((draft[5] + verify[8]) / 1e3, rel=1e-6)
    assert read.cost.plain_step_seconds(5) == pytest.approx(verify[5] / 1e3, rel=1e-6)
    assert read_cost(tmp_path / "vllm.log") == read.cost


def test_abbreviated_vllm_log_is_refused(tmp_path):
    text = vllm_line((np.linspace(0, 1, 10), np.linspace(1, 2, 5000)))
    with pytest.raises(DataError, match="more than 1000 entries"):
        read_engine_cost(write(tmp_path / "vllm.log", text))
    with pytest.raises(DataError, match="two arrays"):
        read_engine_cost(write(tmp_path / "vllm.log", "x DSpark cost tables: None\n"))


def test_one_axis_to_two_keeps_the_staircase():
    two = additive(STAIRS)
    for tokens in range(1, 40):
        assert two.step_seconds(1, tokens) == pytest.approx(STAIRS.step_seconds(1, tokens), rel=1e-12)
    line = CostTable((1, 20), (100.0, 50.0), "linear")
    for tokens in range(1, 30):
        assert additive(line).step_seconds(1, tokens) == pytest.approx(line.step_seconds(1, tokens), rel=1e-12)
    assert additive(SUM) is SUM
    assert additive(CostProfile((10, 90), (SUM, STAIRS)), context=12) is SUM


def test_two_axes_to_one_need_a_load():
    one = one_axis(SUM, requests=4)
    for tokens in range(1, 65):
        assert one.step_seconds(1, tokens) == pytest.approx(SUM.step_seconds(4, tokens), rel=1e-12)
    diagonal = one_axis(SUM, tokens_per_request=4)
    assert diagonal.step_seconds(1, 64) == pytest.approx(SUM.step_seconds(16, 64), rel=1e-12)
    assert one_axis(STAIRS) is STAIRS
    for bad in ({}, {"requests": 4, "tokens_per_request": 4}):
        with pytest.raises(ConfigError, match="only for a given load"):
            one_axis(SUM, **bad)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"sample_batch_tokens": [], "sample_steps_per_sec": [], "max_batch_tokens": 1}, "batch_tokens is empty"),
        ({"sample_batch_tokens": [1]}, "lacks the key"),
        ('{"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, NaN]}', "finite"),
        ({"bias_seconds": 0.1}, "lacks the key"),
        ({"token_counts": [], "step_time_ms": []}, "token_probes is empty"),
        ({"anything": 1}, "no known cost table"),
    ],
)
def test_bad_cost_files_are_refused(tmp_path, data, message):
    with pytest.raises(ConfigError, match=message):
        read_engine_cost(write(tmp_path / "cost.json", data))


def test_missing_files_are_named(tmp_path):
    for read in (read_engine_cost, read_sts):
        with pytest.raises(DataError, match="does not exist"):
            read(tmp_path / "none.json")
