"""Features from disk are those of the target; interrupted, damaged, foreign and oversized caches are noticed."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from modelopt_spec.data import cache_plan, cache_writer
from modelopt_spec.data.cache_format import dequantize, quantize, row_needs, target_fingerprint
from modelopt_spec.data.cache_plan import estimate_cache
from modelopt_spec.data.collate import collate_rows
from modelopt_spec.data.config import CacheConfig
from modelopt_spec.data.feature_cache import verify_cache, write_cache
from modelopt_spec.errors import DataError
from modelopt_spec.records import TargetFeatures
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.cached import CachedFeatures
from tests.tiny import tiny

TAPS = (1, 3)
IDENTITY = {"target": "t" * 64, "data": "d" * 64}


def make_rows(count: int, seed: int = 0, longest: int = 40) -> list[dict]:
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(generator.integers(8, longest))
        mask = np.zeros(length, dtype=bool)
        start = int(generator.integers(2, length - 3))
        mask[start : int(generator.integers(start + 2, length + 1))] = True
        rows.append({"input_ids": generator.integers(3, 97, size=length).astype(np.int32), "loss_mask": mask})
    return rows


def pack(rows: list[dict]) -> dict:
    segments = [np.full(len(row["input_ids"]), i, dtype=np.int32) for i, row in enumerate(rows)]
    return {
        "input_ids": np.concatenate([row["input_ids"] for row in rows]),
        "loss_mask": np.concatenate([row["loss_mask"] for row in rows]),
        "segment_ids": np.concatenate(segments),
    }


@pytest.fixture(scope="module")
def target():
    return open_target(tiny())


def online(target, row: dict) -> TargetFeatures:
    ids = torch.from_numpy(row["input_ids"]).long()[None]
    positions = None
    if "segment_ids" in row:
        positions = collate_rows([row], 0)["position_ids"]
    found = target.features(ids, TAPS, position_ids=positions)
    return TargetFeatures(found.taps[0], found.last_hidden[0])


def small(**changes) -> CacheConfig:
    return CacheConfig(shard_mb=1, batch_tokens=200, **changes)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("positions", ["all", "needed"])
def test_rows_read_back_as_the_target_gives_them(target, tmp_path, packed: bool, positions: str) -> None:
    rows = make_rows(12)
    if packed:
        rows = [pack(rows[:3]), rows[3], pack(rows[4:6])]
    index = write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(positions=positions), quiet=True)
    assert index.dtype == index.source_dtype == "float32"
    cache = CachedFeatures(tmp_path / "c", TAPS, IDENTITY, verify=True)
    for number, row in enumerate(rows):
        expected, found = online(target, row), cache[number]
        needs = row_needs(row["loss_mask"], positions, row.get("segment_ids"))
        torch.testing.assert_close(found.taps[: needs.taps], expected.taps[: needs.taps], rtol=1e-5, atol=1e-5)
        assert not found.taps[needs.taps :].any()
        last = torch.from_numpy(needs.last).long()
        torch.testing.assert_close(found.last_hidden[last], expected.last_hidden[last], rtol=1e-5, atol=1e-5)
        others = torch.ones(len(row["input_ids"]), dtype=torch.bool)
        others[last] = False
        assert not found.last_hidden[others].any()
        if positions == "all":
            assert needs.taps == len(needs.last) == len(row["input_ids"])


def test_needed_positions_are_those_that_blocks_read() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 0], dtype=bool)
    needs = row_needs(mask, "needed")
    assert (needs.taps, needs.last.tolist()) == (5, [1, 2, 4])
    segments = np.array([0, 0, 1, 1, 1, 1, 1, 1])
    assert row_needs(mask, "needed", segments).last.tolist() == [2, 4]
    nothing = row_needs(np.zeros(4, dtype=bool), "needed")
    assert (nothing.taps, len(nothing.last)) == (0, 0)
    assert row_needs(np.ones(3, dtype=bool), "needed").last.tolist() == [0, 1]


def test_batches_come_back_padded_and_rows_are_found_by_their_tokens(target, tmp_path) -> None:
    rows = make_rows(9)
    write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(positions="all"), quiet=True)
    cache = CachedFeatures(tmp_path / "c", TAPS, IDENTITY)
    for wanted, named in (([4, 0, 7], [4, 0, 7]), ([2, 8], [0, 500])):
        batch = collate_rows([rows[i] for i in wanted], pad_token_id=0)
        lengths = [len(rows[i]["input_ids"]) for i in wanted]
        found = cache.features(batch["input_ids"], lengths, named, None)
        assert found.taps.shape[:2] == batch["input_ids"].shape
        for place, i in enumerate(wanted):
            assert torch.equal(found.taps[place, : lengths[place]], cache[i].taps)
            assert torch.equal(found.last_hidden[place, : lengths[place]], cache[i].last_hidden)
            assert not found.taps[place, lengths[place] :].any()
    other = make_rows(1, seed=5)
    batch = collate_rows(other, pad_token_id=0)
    lengths = [len(other[0]["input_ids"])]
    with pytest.raises(DataError, match="row 3 of the data set is not in feature cache"):
        cache.features(batch["input_ids"], lengths, [3], None)
    from modelopt_spec.training.features import OnlineFeatures

    cache.fallback = OnlineFeatures(target, TAPS)
    found = cache.features(batch["input_ids"], lengths, [3], None)
    torch.testing.assert_close(found.taps[0], online(target, other[0]).taps)


def test_features_in_memory_do_not_mix_data_sets(target) -> None:
    """Row 0 of the training set and row 0 of the validation set have other tokens."""
    from modelopt_spec.training.features import MemoryFeatures, OnlineFeatures

    memory = MemoryFeatures(OnlineFeatures(target, TAPS))
    for row in [*make_rows(2), *make_rows(2)]:
        batch = collate_rows([row], pad_token_id=0)
        found = memory.features(batch["input_ids"], [len(row["input_ids"])], [0], None)
        torch.testing.assert_close(found.taps[0], online(target, row).taps)
    assert len(memory) == 2


def test_loss_and_gradients_are_those_of_online_features(tmp_path) -> None:
    import modelopt_spec as mtsp
    from modelopt_spec.config import LossConfig
    from modelopt_spec.training.features import OnlineFeatures
    from modelopt_spec.training.module import DraftTrainingModule

    model = tiny()
    head = {"type": "vanilla", "rank": 8}
    config = {
        "target_layer_ids": TAPS,
        "block_size": 4,
        "mask_token_id": 96,
        "head": head,
        "confidence": {"enabled": True},
    }
    mtsp.convert(model, ("dspark", config), quiet=True)
    target = model.drafter.target
    loss = LossConfig(ce=0.1, tv=0.9, confidence=1.0)
    packed = [pack(make_rows(3, seed=1)), pack(make_rows(2, seed=2))]
    for name, rows in (("plain", make_rows(4)), ("packed", packed)):
        write_cache(target, rows, TAPS, tmp_path / name, IDENTITY, small(), quiet=True)
        batch = collate_rows(rows, pad_token_id=0)
        batch |= {"lengths": [len(row["input_ids"]) for row in rows], "rows": list(range(len(rows)))}
        results = []
        for source in (OnlineFeatures(target, TAPS), CachedFeatures(tmp_path / name, TAPS, IDENTITY)):
            module = DraftTrainingModule(model, loss, num_anchors=6, source=source)
            blocks = module.blocks(batch, torch.Generator().manual_seed(0))
            model.drafter.zero_grad()
            value = module(batch, blocks)[0]
            value.backward()
            gradients = {n: p.grad.clone() for n, p in model.drafter.named_parameters() if p.grad is not None}
            results.append((value.detach(), gradients))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-6)
        assert results[0][1].keys() == results[1][1].keys()
        assert any(gradient.abs().max() > 1e-4 for gradient in results[0][1].values())
        for key, gradient in results[0][1].items():
            torch.testing.assert_close(gradient, results[1][1][key], rtol=1e-4, atol=1e-6)


def test_fp8_is_as_precise_as_its_mantissa() -> None:
    values = torch.randn(200, 4 * 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 200)[:, None]
    values[7] = 0
    stored, scale = quantize(values, 4)
    assert (stored.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, (200, 4))
    back = dequantize(stored, scale, torch.float32)
    largest = values.unflatten(-1, (4, 32)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    # half a unit in the last of three mantissa bits, or half a subnormal step
    assert ((back - values).abs() <= values.abs() / 16 + largest * 2.0**-10 / 448 + 1e-12).all()
    assert not back[7].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_smaller_dtypes(target, tmp_path, dtype: str, tolerance: float) -> None:
    rows = make_rows(5)
    index = write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(dtype=dtype, positions="all"), quiet=True)
    size = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    assert abs(size - index.bytes) < 2000
    cache = CachedFeatures(tmp_path / "c", TAPS, IDENTITY)
    expected, found = online(target, rows[2]), cache[2]
    assert found.taps.dtype == torch.float32
    scale = expected.taps.abs().max()
    assert ((found.taps - expected.taps).abs() <= tolerance * expected.taps.abs() + 1e-4 * scale).all()
    difference = (found.last_hidden - expected.last_hidden).abs()
    assert (difference <= 2**-8 * expected.last_hidden.abs() + 1e-4).all()


def test_bf16_targets_come_back_bit_for_bit(tmp_path) -> None:
    target = open_target(tiny(dtype=torch.bfloat16))
    row = make_rows(1)[0]
    index = write_cache(target, [row], TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    assert index.dtype == index.source_dtype == "bf16"
    found = CachedFeatures(tmp_path / "c", TAPS, IDENTITY)[0]
    expected = online(target, row)
    needs = row_needs(row["loss_mask"], "needed")
    assert torch.equal(found.taps[: needs.taps], expected.taps[: needs.taps])
    assert torch.equal(found.last_hidden[needs.last], expected.last_hidden[needs.last])


class _Wide:
    """A fake target whose features are large, so that a few rows make several shards; counts its tokens."""

    def __init__(self, width: int = 2048, delay: float = 0.0, fail_after: int | None = None) -> None:
        self.width, self.delay, self.fail_after, self.calls = width, delay, fail_after, 0

    def features(self, input_ids, layer_ids, *, attention_mask=None, position_ids=None) -> TargetFeatures:
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise KeyboardInterrupt
        time.sleep(self.delay)
        base = input_ids[..., None].float() + torch.arange(self.width)
        return TargetFeatures(torch.cat([base * (i + 1) for i in layer_ids], -1), base)


def check_wide(path: Path, rows: list[dict]) -> None:
    cache = CachedFeatures(path, TAPS, IDENTITY, verify=True)
    whole = _Wide()
    for number, row in enumerate(rows):
        needs = row_needs(row["loss_mask"], "needed")
        expected = whole.features(torch.from_numpy(row["input_ids"]).long()[None], TAPS)
        assert torch.equal(cache[number].taps[: needs.taps], expected.taps[0, : needs.taps])


def test_an_interrupted_cache_goes_on_where_it_was(tmp_path) -> None:
    rows = make_rows(40)
    target = _Wide(fail_after=8)
    with pytest.raises(KeyboardInterrupt):
        write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    with pytest.raises(DataError, match=r"shards are missing"):
        CachedFeatures(tmp_path / "c", TAPS, IDENTITY)
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*.safetensors")}
    assert done
    index = write_cache(_Wide(), rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    assert len(index.shards) > len(done) + 2
    for name, stamp in done.items():
        assert (tmp_path / "c" / name).stat().st_mtime_ns == stamp, "a finished shard is not written again"
    check_wide(tmp_path / "c", rows)
    fresh = _Wide()
    write_cache(fresh, rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    assert fresh.calls == 1, "a complete cache needs only the probe"


def test_killed_while_writing(tmp_path) -> None:
    rows = make_rows(60)
    path = tmp_path / "c"
    for kill in range(3):
        arguments = (_Wide(delay=0.01), rows, TAPS, path, IDENTITY, small())
        child = multiprocessing.get_context("fork").Process(target=write_cache, args=arguments, kwargs={"quiet": True})
        child.start()
        while child.is_alive() and len(list(path.glob("*.safetensors"))) < 2 * kill + 1:
            time.sleep(0.002)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    write_cache(_Wide(), rows, TAPS, path, IDENTITY, small(), quiet=True)
    check_wide(path, rows)


def test_damage_is_noticed_and_repaired(tmp_path) -> None:
    rows = make_rows(30)
    path = tmp_path / "c"
    index = write_cache(_Wide(), rows, TAPS, path, IDENTITY, small(), quiet=True)
    first, second, third = (path / shard.file for shard in index.shards[:3])
    content = bytearray(first.read_bytes())
    content[-7] ^= 1
    first.write_bytes(bytes(content))
    assert verify_cache(path) == [first.name]
    CachedFeatures(path, TAPS, IDENTITY)
    with pytest.raises(DataError, match=first.name):
        CachedFeatures(path, TAPS, IDENTITY, verify=True)
    second.write_bytes(second.read_bytes()[:-100])
    third.unlink()
    with pytest.raises(DataError, match=f"2 of {len(index.shards)} shards"):
        CachedFeatures(path, TAPS, IDENTITY)
    first.unlink()
    write_cache(_Wide(), rows, TAPS, path, IDENTITY, small(), quiet=True)
    assert verify_cache(path) == []
    check_wide(path, rows)


def test_ranks_share_the_shards(tmp_path) -> None:
    rows = make_rows(30)
    path = tmp_path / "c"
    index = write_cache(_Wide(), rows, TAPS, path, IDENTITY, small(), rank=0, world_size=2, quiet=True)
    assert len(verify_cache(path)) == len(index.shards) // 2
    write_cache(_Wide(), rows, TAPS, path, IDENTITY, small(), rank=1, world_size=2, quiet=True)
    check_wide(path, rows)


def test_another_target_data_or_tap_is_refused(target, tmp_path) -> None:
    rows = make_rows(4)
    path = tmp_path / "c"
    write_cache(target, rows, TAPS, path, {**IDENTITY, "tokenizer": "k" * 64}, small(), quiet=True)
    for name in ("target", "data", "tokenizer"):
        with pytest.raises(DataError, match=f"another {name}"):
            CachedFeatures(path, TAPS, {**IDENTITY, name: "x" * 64})
    with pytest.raises(DataError, match="template: not recorded"):
        CachedFeatures(path, TAPS, {**IDENTITY, "template": "x" * 64})
    with pytest.raises(DataError, match=r"holds taps \[1, 3\], the drafter reads \[1, 2\]"):
        CachedFeatures(path, (1, 2), IDENTITY)
    with pytest.raises(DataError, match="fingerprint of the data"):
        CachedFeatures(path, TAPS, {"target": IDENTITY["target"]})
    with pytest.raises(DataError, match="not a feature cache"):
        CachedFeatures(tmp_path / "nothing", TAPS, IDENTITY)
    with pytest.raises(DataError, match=r"lacks \['data'\]"):
        write_cache(target, rows, TAPS, tmp_path / "d", {"target": "x"}, quiet=True)
    with pytest.raises(DataError, match="another rows"):
        write_cache(target, rows[:3], TAPS, path, {**IDENTITY, "tokenizer": "k" * 64}, small(), quiet=True)
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        write_cache(target, rows, TAPS, tmp_path / "e", IDENTITY, quiet=True)


def test_size_is_known_and_checked_before_a_byte_is_written(target, tmp_path, monkeypatch) -> None:
    rows = make_rows(50)
    estimate = estimate_cache(rows, num_taps=2, hidden_size=32, dtype="float32")
    with pytest.raises(DataError, match=r"cache.max_gb is 1e-06"):
        write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(max_gb=1e-6), quiet=True)
    usage = cache_plan.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        cache_plan.shutil, "disk_usage", lambda path: usage._replace(free=cache_plan.DISK_MARGIN + 1000)
    )
    with pytest.raises(DataError, match=r"GiB free: choose another disk"):
        write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    assert not (tmp_path / "c").exists()
    monkeypatch.undo()
    index = write_cache(target, rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    assert index.bytes == estimate.bytes
    written = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.safetensors"))
    assert 0 <= written - estimate.bytes < 1000 * len(index.shards)
    assert estimate.tap_positions < estimate.tokens


def test_a_full_disk_ends_the_run_and_keeps_finished_shards(tmp_path, monkeypatch) -> None:
    write_one, written = cache_writer.write_shard, []

    def failing(directory, shard, data) -> None:
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        written.append(shard)
        write_one(directory, shard, data)

    monkeypatch.setattr(cache_writer, "write_shard", failing)
    rows = make_rows(40)
    with pytest.raises(DataError, match=r"No space left.*finished shards stay"):
        write_cache(_Wide(), rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    monkeypatch.undo()
    write_cache(_Wide(), rows, TAPS, tmp_path / "c", IDENTITY, small(), quiet=True)
    check_wide(tmp_path / "c", rows)


def test_fingerprints_see_weights_and_dtypes_but_not_the_drafter() -> None:
    model = tiny()
    first = target_fingerprint(model)
    assert target_fingerprint(tiny()) == first
    assert target_fingerprint(tiny(seed=1)) != first
    assert target_fingerprint(tiny(dtype=torch.bfloat16)) != first
    model.drafter = torch.nn.Linear(2, 2)
    assert target_fingerprint(model) == first


def test_index_is_plain_json(target, tmp_path) -> None:
    index = write_cache(target, make_rows(3), TAPS, tmp_path / "c", IDENTITY, quiet=True)
    values = json.loads((tmp_path / "c" / "index.json").read_text())
    assert values["identity"] == IDENTITY
    assert values["shards"] == [dataclasses.asdict(shard) for shard in index.shards]


def test_fingerprint_of_a_weight_with_more_entries_than_float32_can_count() -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(2**24 + 3).uniform_())
    first = target_fingerprint(model)
    with torch.no_grad():
        model.weight[-1] += 1.0
    assert target_fingerprint(model) != first
