"""The scheduler files that engines read, both directions: calibration temperatures and step-cost tables.

=====================  ================================================================================================
format                 content
=====================  ================================================================================================
``sglang_sts``         ``{"temperatures": [G], "dataset", "num_samples", "ece_before", "ece_after"}``; TensorRT-LLM
                       reads the same file, or the key ``sts_temperatures``
``sglang_one_axis``    ``{"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}``, floor lookup
``sglang_two_axis``    ``{"bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds"}``, linear, clamped
``tensorrt_llm``       the same sum in milliseconds: ``fixed_overhead_ms``, ``batch_sizes``, ``batch_overhead_ms``,
                       ``token_counts``, ``step_time_ms`` (linear, clamped; marked ``_meta.lookup = "interp"``)
``tensorrt_llm_v2``    ``schema_version`` 2: measured whole steps ``cost_tables {R: {token_counts, step_time_ms}}`` with
                       an engine fingerprint and its SHA-256
``vllm_log``           the debug line ``DSpark cost tables: (array([...]), array([...]))``: milliseconds of a draft pass
                       over requests and of a verification pass over tokens, index = count. Read only
=====================  ================================================================================================

What was written by this module carries its identity under ``"mtsp"``; the engines' parsers ignore that key.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from modelopt_spec.errors import ConfigError, DataError, UnsupportedError
from modelopt_spec.scheduling.calibration import check_temperatures
from modelopt_spec.scheduling.cost import AdditiveCostTable, CostProfile, CostTable
from modelopt_spec.scheduling.cost_fit import Cell, fit_additive, fit_one_axis
from modelopt_spec.text_files import read_text

__all__ = [
    "EngineCost",
    "StsFile",
    "additive",
    "canonical_sha256",
    "one_axis",
    "read_engine_cost",
    "read_sts",
    "sglang_one_axis",
    "sglang_sts",
    "sglang_two_axis",
    "tensorrt_llm",
    "tensorrt_llm_v2",
]

Table = CostTable | AdditiveCostTable

_VLLM_MARK = "DSpark cost tables:"
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_DENSE_LIMIT = 8192
_V2_FINGERPRINT_KEYS = (
    "gpu",
    "gpu_count",
    "gpu_snapshot_sha256",
    "max_draft_len",
    "rank_local_graph_batch_sizes",
    "runtime_snapshot",
    "source_diff_sha256",
    "source_head",
    "topology",
)


@dataclass(frozen=True)
class StsFile:
    """Calibration temperatures with what the file says about them."""

    temperatures: tuple[float, ...]
    dataset: str = ""
    num_samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineCost:
    """A cost table read from an engine's file."""

    format: str
    cost: Table
    identity: Mapping[str, Any] = field(default_factory=dict)
    """What the file says about where it was measured; empty for files that say nothing."""


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_sts(path: str | Path, gamma: int | None = None) -> StsFile:
    """Read temperatures; ConfigError for another number of slots than ``gamma``, or values that are not positive."""
    data = _load_json(Path(path))
    values = data.get("temperatures", data.get("sts_temperatures"))
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path} has no temperatures (keys {sorted(data)}): it is no calibration file")
    temperatures = check_temperatures(values, gamma if gamma is not None else len(values))
    return StsFile(
        temperatures=tuple(temperatures.tolist()),
        dataset=str(data.get("dataset", "")),
        num_samples=int(data.get("num_samples", 0)),
        ece_before=tuple(data.get("ece_before", ())),
        ece_after=tuple(data.get("ece_after", ())),
        identity=data.get("mtsp", {}),
    )


def read_engine_cost(path: str | Path) -> EngineCost:
    """Read any of the cost formats of this module; the format is recognised by its keys."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"cost table {path} does not exist")
    text = read_text(path, "an engine's cost table (JSON, or vLLM's log)")
    if _VLLM_MARK in text:
        return EngineCost("vllm_log", _parse_vllm_log(text, str(path)))
    data = _load_json(path)
    identity = data.get("mtsp", {})
    try:
        if "sample_batch_tokens" in data:
            table = CostTable(_ints(data["sample_batch_tokens"]), _floats(data["sample_steps_per_sec"]))
            return EngineCost("sglang_one_axis", table, identity)
        if "bias_seconds" in data:
            two = AdditiveCostTable(
                float(data["bias_seconds"]),
                _ints(data["bs_probes"]),
                _floats(data["alpha_seconds"]),
                _ints(data["m_probes"]),
                _floats(data["theta_seconds"]),
            )
            return EngineCost("sglang_two_axis", two, identity)
        if "cost_tables" in data:
            return EngineCost("tensorrt_llm_v2", _parse_v2(data, str(path)), data.get("engine_fingerprint", {}))
        if "token_counts" in data:
            engine = (data.get("_meta") or {}).get("engine", {})
            return EngineCost("tensorrt_llm", _parse_tensorrt_llm(data), identity or engine)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the key {error}: the cost table is incomplete") from error
    raise ConfigError(f"{path} is no known cost table (keys {sorted(data)})")


def _parse_tensorrt_llm(data: Mapping[str, Any]) -> AdditiveCostTable:
    return AdditiveCostTable(
        bias_seconds=float(data.get("fixed_overhead_ms", 0.0)) / 1e3,
        request_probes=_ints(data.get("batch_sizes") or (1,)),
        alpha_seconds=tuple(v / 1e3 for v in data.get("batch_overhead_ms") or (0.0,)),
        token_probes=_ints(data["token_counts"]),
        theta_seconds=tuple(v / 1e3 for v in data["step_time_ms"]),
    )


def _parse_v2(data: Mapping[str, Any], where: str) -> Table:
    """Exact cells of whole steps; fitted as a sum where the cells can tell alpha from theta, else over tokens alone."""
    if data.get("schema_version") != 2:
        raise ConfigError(f"{where}: cost_tables need schema_version 2, the file says {data.get('schema_version')!r}")
    fingerprint = data.get("engine_fingerprint")
    if fingerprint is not None and data.get("engine_fingerprint_sha256") != canonical_sha256(fingerprint):
        raise ConfigError(f"{where}: engine_fingerprint_sha256 does not match the fingerprint: the file was edited")
    cells = [
        Cell(int(requests), int(tokens), 0, float(ms) / 1e3)
        for requests, table in data["cost_tables"].items()
        for tokens, ms in zip(table["token_counts"], table["step_time_ms"])
    ]
    try:
        return fit_additive(cells)[0]
    except DataError:
        return fit_one_axis(cells)[0]


def _parse_vllm_log(text: str, where: str) -> AdditiveCostTable:
    lines = _ANSI.sub("", text).replace("\r", "").split("\n")
    start = max(i for i, line in enumerate(lines) if _VLLM_MARK in line)
    prefix, _, message = lines[start].partition(_VLLM_MARK)
    for line in lines[start + 1 :]:
        if message.count("(") <= message.count(")"):
            break
        message += line.removeprefix(prefix)
    arrays = re.findall(r"array\(\[(.*?)\]", message)
    if len(arrays) != 2:
        raise DataError(f"{where}: the line {_VLLM_MARK!r} does not hold two arrays")
    if any("..." in array for array in arrays):
        raise DataError(
            f"{where}: numpy abbreviated the cost tables (more than 1000 entries). Start the engine with "
            "--max-num-batched-tokens below 1000, or raise numpy's print threshold"
        )
    draft, verify = (np.array([float(v) for v in array.split(",") if v.strip()]) / 1e3 for array in arrays)
    if len(draft) < 2 or len(verify) < 2:
        raise DataError(f"{where}: the cost tables have {len(draft)} and {len(verify)} entries, index 0 being unused")
    per_request = tuple(draft[1:].tolist())
    return AdditiveCostTable(
        bias_seconds=0.0,
        request_probes=tuple(range(1, len(draft))),
        alpha_seconds=per_request,
        token_probes=tuple(range(1, len(verify))),
        theta_seconds=tuple(verify[1:].tolist()),
        draft_seconds=per_request,
    )


# ---- conversion ------------------------------------------------------------------------------------------------------


def additive(cost: Table | CostProfile, *, context: float | None = None) -> AdditiveCostTable:
    """Any table as ``bias + alpha(R) + theta(M)``; a staircase keeps its cliffs as neighbouring probes."""
    table = cost.at(context) if isinstance(cost, CostProfile) else cost
    if isinstance(table, AdditiveCostTable):
        return table
    if table.lookup == "linear":
        tokens = _dense(table.max_tokens)
    else:
        edges = [knot - 1 for knot in table.batch_tokens[1:]]
        tokens = np.unique([*table.batch_tokens, *edges])
    seconds = table.step_seconds(0, tokens)
    return AdditiveCostTable(
        0.0, (1,), (0.0,), tuple(int(t) for t in tokens), tuple(float(s) for s in seconds)
    ).normalised()


def one_axis(
    cost: Table | CostProfile,
    *,
    requests: int | None = None,
    tokens_per_request: float | None = None,
    context: float | None = None,
) -> CostTable:
    """Any table as SPS over batch tokens.

    A two-axis table needs a rule for the requests at each token count, because one axis cannot hold both: a fixed
    number (``requests``), or tokens / ``tokens_per_request``.
    """
    table = cost.at(context) if isinstance(cost, CostProfile) else cost
    if isinstance(table, CostTable):
        return table
    if (requests is None) == (tokens_per_request is None):
        raise ConfigError(
            "a two-axis cost table becomes one axis only for a given load: pass requests (fixed batch size) or "
            "tokens_per_request (mean tokens of a request in a step)"
        )
    tokens = _dense(table.max_tokens)
    counts = [requests or max(1.0, t / (tokens_per_request or 1.0)) for t in tokens]
    sps = [1.0 / float(table.step_seconds(round(count), t)) for count, t in zip(counts, tokens)]
    return CostTable(tuple(int(t) for t in tokens), tuple(sps))


def _dense(last: int) -> Any:
    """Token counts 1 .. last, thinned to at most 8192."""
    return np.unique(np.linspace(1, last, min(last, _DENSE_LIMIT)).astype(np.int64))


# ---- writing ---------------------------------------------------------------------------------------------------------


def sglang_sts(sts: StsFile) -> dict[str, Any]:
    """Content of SGLang's (and TensorRT-LLM's) calibration file."""
    check_temperatures(sts.temperatures, len(sts.temperatures))
    if not sts.temperatures:
        raise ConfigError("temperatures is empty: a calibration has one a slot")
    return {
        "temperatures": list(sts.temperatures),
        "dataset": sts.dataset,
        "num_samples": sts.num_samples,
        "ece_before": list(sts.ece_before),
        "ece_after": list(sts.ece_after),
    } | _identity(sts.identity)


def sglang_one_axis(
    cost: CostTable, *, max_batch_tokens: int | None = None, identity: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Content of SGLang's one-axis table. A table of a single knot is refused: SGLang takes it for "not profiled"."""
    if cost.lookup != "staircase":
        raise UnsupportedError("SGLang's one-axis table is a staircase: write a linear table as two axes")
    if len(cost.batch_tokens) < 2:
        raise DataError("the cost table has a single knot: SGLang treats it as not profiled and verifies everything")
    return {
        "sample_batch_tokens": list(cost.batch_tokens),
        "sample_steps_per_sec": list(cost.steps_per_sec),
        "max_batch_tokens": max(cost.max_tokens, max_batch_tokens or 0),
    } | _identity(identity)


def sglang_two_axis(cost: AdditiveCostTable, *, identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Content of SGLang's two-axis table (its parser wants a positive bias, so the constant goes there)."""
    table = cost.normalised()
    return {
        "bias_seconds": table.bias_seconds,
        "bs_probes": list(table.request_probes),
        "alpha_seconds": list(table.alpha_seconds),
        "m_probes": list(table.token_probes),
        "theta_seconds": list(table.theta_seconds),
    } | _identity(identity)


def tensorrt_llm(cost: AdditiveCostTable, *, identity: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Content of TensorRT-LLM's table (its parser wants positive step times, so the constant goes there)."""
    table = cost.normalised()
    return {
        "token_counts": list(table.token_probes),
        "step_time_ms": [1e3 * (table.bias_seconds + v) for v in table.theta_seconds],
        "fixed_overhead_ms": 0.0,
        "batch_sizes": list(table.request_probes),
        "batch_overhead_ms": [1e3 * v for v in table.alpha_seconds],
        "_meta": {"lookup": "interp", "engine": dict(identity or {})},
    }


def tensorrt_llm_v2(
    cells: Sequence[Cell], *, gamma: int, engine_fingerprint: Mapping[str, Any], source_sha256: str
) -> dict[str, Any]:
    """Content of TensorRT-LLM's schema 2, which holds measured whole steps only (no fitted or interpolated point).

    Args:
        cells: measured steps of one context length; each request count needs its full block, R * (gamma + 1) tokens.
        gamma: ``max_draft_len``.
        engine_fingerprint: the engine's own fingerprint object.
        source_sha256: SHA-256 (hex) of the measurement file that the cells come from.
    """
    missing = sorted(set(_V2_FINGERPRINT_KEYS) - engine_fingerprint.keys())
    if missing:
        raise ConfigError(f"engine_fingerprint lacks {missing}: copy it from the engine's provenance file")
    if len(source_sha256) != 64:
        raise ConfigError(f"source_sha256 is {source_sha256!r}: it is the hex SHA-256 of the measurement file")
    tables: dict[str, dict[str, list[Any]]] = {}
    for cell in sorted(cells, key=lambda c: (c.requests, c.tokens)):
        table = tables.setdefault(str(cell.requests), {"token_counts": [], "step_time_ms": []})
        table["token_counts"].append(cell.tokens)
        table["step_time_ms"].append(1e3 * cell.seconds)
    for requests, table in tables.items():
        full = int(requests) * (gamma + 1)
        if full not in table["token_counts"]:
            raise DataError(
                f"cells of {requests} requests lack the full block of {full} tokens, which schema 2 requires"
            )
    return {
        "schema_version": 2,
        "cost_tables": tables,
        "engine_fingerprint": dict(engine_fingerprint),
        "engine_fingerprint_sha256": canonical_sha256(engine_fingerprint),
        "measurements": [
            {
                "rank_local_graph_batch_size": cell.requests,
                "rank_local_verifier_budget": cell.tokens,
                "step_time_ms": 1e3 * cell.seconds,
                "source_result_sha256": source_sha256,
            }
            for cell in sorted(cells, key=lambda c: (c.requests, c.tokens))
        ],
    }


def canonical_sha256(value: Any) -> str:
    """SHA-256 of the JSON text with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _identity(identity: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"mtsp": dict(identity)} if identity else {}


def _ints(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(v) for v in values)


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    try:
        data = json.loads(read_text(path, "a scheduler file (JSON)", ConfigError))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__}: a scheduler file is a JSON object")
    return data
