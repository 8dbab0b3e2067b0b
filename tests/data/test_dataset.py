"""From sources to token rows: order, copies, splits, limits, rejects, packing and files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from modelopt_spec.data import (
    DataConfig,
    SourceConfig,
    collate_rows,
    load_datasets,
    load_rows,
    looping,
    open_prepared,
    prepare,
    read_prompts,
    render_row,
)
from modelopt_spec.data.messages import first_prompt, parse_row
from modelopt_spec.data.ordering import KeyedRow, RowOrder, row_key
from modelopt_spec.data.packing import pack_samples
from modelopt_spec.data.store import Sample
from modelopt_spec.errors import ConfigError, DataError
from tests.data import tiny


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


def write(path: Path, rows: list) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows_of(count: int, start: int = 0) -> list[dict]:
    return [
        tiny.chat(f"Question {i}?", f"Answer number {i}, thank you." + " Really." * (i % 5))
        for i in range(start, start + count)
    ]


def texts(tokenizer, dataset) -> list[str]:
    return [tokenizer.decode(row["input_ids"]) for row in dataset]


def test_rows_are_the_renderers_rows(tokenizer, tmp_path) -> None:
    rows = rows_of(20)
    dataset, report = load_rows(write(tmp_path / "a.jsonl", rows), tokenizer, DataConfig(shuffle=False))
    for stored, row in zip(dataset, rows, strict=True):
        (expected,) = render_row(row, tokenizer)
        assert stored["input_ids"].tolist() == expected.input_ids
        assert stored["loss_mask"].tolist() == expected.loss_mask
        assert stored["length"] == len(expected.input_ids)
    assert (report.rows_read, report.rows_kept, report.samples) == (20, 20, 20)
    assert report.tokens == sum(len(row["input_ids"]) for row in dataset)
    assert report.supervised_tokens == sum(int(row["loss_mask"].sum()) for row in dataset)


def test_the_order_depends_on_the_seed_and_the_rows_only(tokenizer, tmp_path) -> None:
    rows = rows_of(60)
    whole = write(tmp_path / "whole.jsonl", rows)
    parts = [write(tmp_path / "b.jsonl", rows[:17]), write(tmp_path / "a.jsonl", rows[17:][::-1])]
    first, report = load_rows(whole, tokenizer)
    second, other = load_rows(parts, tokenizer)
    assert texts(tokenizer, first) == texts(tokenizer, second)
    assert report.fingerprint == other.fingerprint
    third, seeded = load_rows(whole, tokenizer, DataConfig(seed=1))
    assert seeded.fingerprint != report.fingerprint
    assert sorted(texts(tokenizer, third)) == sorted(texts(tokenizer, first))
    plain, _ = load_rows(whole, tokenizer, DataConfig(shuffle=False))
    assert texts(tokenizer, plain) != texts(tokenizer, first)


def test_a_cut_takes_rows_of_all_sources(tokenizer, tmp_path) -> None:
    sources = [write(tmp_path / "a.jsonl", rows_of(100)), write(tmp_path / "b.jsonl", rows_of(100, 100))]
    dataset, report = load_rows(sources, tokenizer, DataConfig(max_samples=60))
    assert len(dataset) == 60
    assert set(report.rows_by_source) == set(sources)
    assert min(report.rows_by_source.values()) > 15
    assert report.skipped == {"over_limit": 140}
    limited = [SourceConfig(path=sources[0], max_samples=5), SourceConfig(path=sources[1])]
    _, report = load_rows(limited, tokenizer)
    assert report.rows_by_source == {sources[0]: 5, sources[1]: 100}


@pytest.mark.parametrize("shuffle", [True, False])
def test_copies_are_dropped_wherever_they_stand(tokenizer, tmp_path, shuffle: bool) -> None:
    rows = rows_of(30)
    renamed = [{"conversations": row["messages"], "id": i} for i, row in enumerate(rows[:10])]
    sources = [write(tmp_path / "a.jsonl", rows), write(tmp_path / "b.jsonl", renamed)]
    dataset, report = load_rows(sources, tokenizer, DataConfig(shuffle=shuffle))
    assert len(dataset) == 30
    assert report.skipped == {"duplicate": 10}
    kept, _ = load_rows(sources, tokenizer, DataConfig(shuffle=shuffle, deduplicate=False))
    assert len(kept) == 40


def test_splits_share_no_prompt(tokenizer, tmp_path) -> None:
    rows = rows_of(150) + [tiny.chat(f" Question   {i}?", "Another answer.") for i in range(150)]
    source = write(tmp_path / "a.jsonl", rows)
    data = load_datasets(DataConfig(train=source, validation_share=0.2), tokenizer, quiet=True)
    assert data.validation is not None
    prompts = [
        {
            text.split("user\n")[1].split("<|im_end|>")[0].strip().replace("  ", " ").replace("  ", " ")
            for text in texts(tokenizer, split)
        }
        for split in (data.train, data.validation)
    ]
    assert prompts[0].isdisjoint(prompts[1])
    assert len(prompts[0] | prompts[1]) == 150
    assert 30 < len(data.validation) < 90
    assert len(data.validation) % 2 == 0, "both answers of a prompt are on the same side"
    assert data.train_report.rows_read + data.validation_report.rows_read == 300
    with pytest.raises(DataError, match="no validation row"):
        load_datasets(DataConfig(train=source, validation_share=1e-9), tokenizer, quiet=True)


def test_prompts_of_validation_sources_and_benchmarks_are_left_out(tokenizer, tmp_path) -> None:
    train = write(tmp_path / "a.jsonl", rows_of(30))
    held_out = write(tmp_path / "b.jsonl", [tiny.chat("Question 3?", "Other words.")])
    bench = write(tmp_path / "c.jsonl", [{"turns": ["Question 4?", "Question 5?"]}])
    config = DataConfig(train=train, validation=held_out, exclude_prompts=bench)
    data = load_datasets(config, tokenizer, quiet=True)
    assert data.train_report.skipped == {"held_out_prompt": 1, "excluded_prompt": 2}
    assert len(data.train) == 27
    assert len(data.validation) == 1
    with pytest.raises(ConfigError, match="only one"):
        config.replace(validation_share=0.1)


def test_spilled_order_equals_the_order_in_memory(tokenizer, tmp_path) -> None:
    rows = [{**row, "looping": i % 2 == 0} for i, row in enumerate(rows_of(300))]
    source = write(tmp_path / "a.jsonl", rows)
    in_memory = load_datasets(DataConfig(train=source), tokenizer, quiet=True)
    source_config = DataConfig(train=source, cache_dir=str(tmp_path / "cache"), memory_mb=1)
    spilled = load_datasets(source_config, tokenizer, quiet=True)
    assert spilled.train_report == in_memory.train_report

    small, large = RowOrder(20_000, tmp_path), RowOrder(10**9)
    plain_small, plain_large = RowOrder(20_000, tmp_path, in_order=True), RowOrder(10**9, in_order=True)
    for index, row in enumerate(rows):
        conversation = parse_row(row)
        digest = conversation.digest()
        for order in (small, large):
            order.add(KeyedRow(row_key(digest, 0), digest, "s", index, conversation, row["looping"]))
        for order in (plain_small, plain_large):
            order.add(KeyedRow(b"", digest, "s", index, conversation, row["looping"]))
    assert small.spilled
    assert not large.spilled
    assert list(small) == list(large)
    small.close()
    assert plain_small.spilled
    assert [row.index for row in plain_small] == list(range(300))
    plain_small.close()
    assert not list(tmp_path.glob(".mtsp-order-*"))


@pytest.mark.parametrize("max_samples", [None, 700])
def test_worker_processes_change_nothing(tokenizer, tmp_path, max_samples: int | None) -> None:
    rows = [*rows_of(1500), {"messages": []}, tiny.chat("Hello", "x")]
    config = DataConfig(
        train=write(tmp_path / "a.jsonl", rows), validation_share=0.1, max_samples=max_samples, pack=True
    )
    alone = load_datasets(config, tokenizer, quiet=True)
    several = load_datasets(config.replace(num_workers=2), tokenizer, quiet=True)
    assert several.train_report == alone.train_report
    assert several.validation_report == alone.validation_report
    assert alone.train_report.rows_kept == max_samples or max_samples is None
    total = alone.train_report.skipped.get("over_limit", 0) + alone.validation_report.skipped.get("over_limit", 0)
    kept = alone.train_report.rows_kept + alone.validation_report.rows_kept
    assert kept + total + alone.train_report.bad + alone.validation_report.bad == 1502


def test_one_bad_row_is_counted_and_written_not_fatal(tokenizer, tmp_path) -> None:
    rows = [*rows_of(40), "{not json", {"messages": [{"role": "narrator", "content": "x"}]}]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows))
    report = prepare(config, tokenizer, tmp_path / "out", quiet=True).train_report
    assert report.skipped == {"not_json": 1, "role": 1}
    assert report.bad == 2
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(entry["row"], entry["line"], entry["reason"]) for entry in rejects] == [
        (40, 41, "not_json"),
        (41, 42, "role"),
    ]
    assert report.examples["role"].startswith(f"{tmp_path / 'a.jsonl'}:42: unknown role")


def test_lines_are_counted_as_editors_count_them(tokenizer, tmp_path) -> None:
    """Blank lines are no rows, but a reader of the message counts them; rows of other files have no lines."""
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(rows_of(1)[0]) + "\n\n{not json\n")
    (tmp_path / "b.json").write_text(json.dumps([*rows_of(2), {"messages": 5}]))
    file = tmp_path / "new" / "rejects.jsonl"
    config = DataConfig(train=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")], max_bad_share=1.0)
    report = load_datasets(config, tokenizer, quiet=True, rejects=file).train_report
    assert report.examples["not_json"].startswith(f"{tmp_path / 'a.jsonl'}:4: ")
    assert report.examples["unknown_shape"].startswith(f"{tmp_path / 'b.json'}, row 2: ")
    assert [(entry["row"], entry.get("line")) for entry in map(json.loads, file.read_text().splitlines())] == [
        (3, 4),
        (2, None),
    ]
    load_datasets(DataConfig(train=str(tmp_path / "b.json"), max_bad_share=1.0), tokenizer, quiet=True, rejects=file)
    assert json.loads(file.read_text())["row"] == 2
    load_datasets(DataConfig(train=write(tmp_path / "c.jsonl", rows_of(3))), tokenizer, quiet=True, rejects=file)
    assert file.read_text() == ""


def test_a_kept_set_is_held_to_the_share_of_the_run_that_opens_it(tokenizer, tmp_path) -> None:
    rows = [*rows_of(8), {"messages": 5}, {"messages": 5}]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows), cache_dir=str(tmp_path / "kept"))
    file = tmp_path / "rejects.jsonl"
    load_datasets(config.replace(max_bad_share=1.0), tokenizer, quiet=True, rejects=file)
    assert [json.loads(line)["line"] for line in file.read_text().splitlines()] == [9, 10]
    with pytest.raises(DataError, match=r"2 of 10 rows of train .*data.max_bad_share 0.05.*rejects.jsonl"):
        load_datasets(config, tokenizer, quiet=True)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.json"])
def test_files_of_another_kind_are_named(name: str, tokenizer, tmp_path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(DataError, match=f"data source .*{name}"):
        load_datasets(DataConfig(train=str(tmp_path / name)), tokenizer, quiet=True)


def test_too_many_bad_rows_stop_the_run(tokenizer, tmp_path) -> None:
    rows = [*rows_of(40), *[{"messages": []}] * 10]
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows))
    told = rf"all of them: {tmp_path}/out.rejects.jsonl$"
    with pytest.raises(DataError, match=r"10 of 50 rows .*0.05: empty 10 \(e.g. \S+a.jsonl:41: .*" + told):
        prepare(config, tokenizer, tmp_path / "out", quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out.rejects.jsonl"]
    assert len(load_datasets(config.replace(max_bad_share=0.5), tokenizer, quiet=True).train) == 40


def test_rows_that_nothing_can_be_learned_from_never_pass_silently(tokenizer, tmp_path) -> None:
    source = write(tmp_path / "a.jsonl", rows_of(10))
    with pytest.raises(DataError, match="truncated_away"):
        load_rows(source, tokenizer, DataConfig(max_length=12))
    with pytest.raises(DataError, match="no training row is left"):
        load_rows(write(tmp_path / "b.jsonl", []), tokenizer)


def test_overwriting_spares_what_is_not_prepared_rows_and_what_is_read(tokenizer, tmp_path) -> None:
    (tmp_path / "mine").mkdir()
    source = write(tmp_path / "mine" / "a.jsonl", rows_of(12))
    with pytest.raises(DataError, match="something else than prepared rows"):
        prepare(DataConfig(train=source), tokenizer, tmp_path / "mine", overwrite=True, quiet=True)
    out = tmp_path / "rows"
    prepare(DataConfig(train=source), tokenizer, out, quiet=True)
    with pytest.raises(DataError, match="holds the source"):
        prepare(DataConfig(train=str(out)), tokenizer, out, overwrite=True, quiet=True)
    prepare(DataConfig(train=source, max_length=64), tokenizer, out, overwrite=True, quiet=True)
    assert open_prepared(out).train_report.samples == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "rows"]


def test_prepared_directories_open_again_and_notice_damage(tokenizer, tmp_path) -> None:
    config = DataConfig(train=write(tmp_path / "a.jsonl", rows_of(50)), validation_share=0.2, pack=True, max_length=256)
    in_memory = load_datasets(config, tokenizer, quiet=True)
    out = tmp_path / "out"
    prepare(config, tokenizer, out, quiet=True)
    again = load_datasets(DataConfig(train=str(out)), tokenizer, quiet=True)
    assert again.train_report == in_memory.train_report
    assert texts(tokenizer, again.train) == texts(tokenizer, in_memory.train)
    assert texts(tokenizer, again.validation) == texts(tokenizer, in_memory.validation)
    with pytest.raises(DataError, match="exists already"):
        prepare(config, tokenizer, out, quiet=True)
    with pytest.raises(DataError, match="another tokenizer"):
        open_prepared(out, tiny.make_tokenizer(kind="metaspace"))
    with pytest.raises(DataError, match="another template"):
        open_prepared(out, tiny.make_tokenizer(tiny.CHATML_TAGS))
    with pytest.raises(DataError, match=r"prepared with data.system_role 'keep', now it is 'merge'"):
        load_datasets(DataConfig(train=str(out), system_role="merge"), tokenizer, quiet=True)
    with pytest.raises(DataError, match=r"rows of up to \d+ tokens, data.max_length is 64"):
        load_datasets(DataConfig(train=str(out), max_length=64), tokenizer, quiet=True)
    shard = next((out / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    open_prepared(out)
    with pytest.raises(DataError, match="damaged"):
        open_prepared(out, verify=True)
    shard.write_bytes(bytes(content[:-10]))
    with pytest.raises(DataError, match="cut short"):
        open_prepared(out)


def test_a_full_disk_is_named_and_leaves_nothing(tokenizer, tmp_path, monkeypatch) -> None:
    from modelopt_spec.data import store

    def full(*args, **kwargs) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write(tmp_path / "a.jsonl", rows_of(20))
    monkeypatch.setattr(store.pa.ipc, "new_stream", full)
    with pytest.raises(DataError, match=r"could not be written .*No space left.*make room"):
        prepare(DataConfig(train=path), tokenizer, tmp_path / "rows", quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_cache_is_used_again_and_follows_its_inputs(tokenizer, tmp_path) -> None:
    source = write(tmp_path / "a.jsonl", rows_of(20))
    config = DataConfig(train=source, cache_dir=str(tmp_path / "cache"))
    first = load_datasets(config, tokenizer, quiet=True)
    made = [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob("rows-*")]
    load_datasets(config.replace(num_workers=0, memory_mb=7), tokenizer, quiet=True)
    assert [(path, path.stat().st_mtime_ns) for path in (tmp_path / "cache").glob("rows-*")] == made
    write(tmp_path / "a.jsonl", rows_of(25))
    assert len(load_datasets(config, tokenizer, quiet=True).train) == len(first.train) + 5
    assert len(list((tmp_path / "cache").glob("rows-*"))) == 2


def test_processes_that_start_together_prepare_once(tokenizer, tmp_path) -> None:
    import multiprocessing

    config = DataConfig(train=write(tmp_path / "a.jsonl", rows_of(400)), cache_dir=str(tmp_path / "cache"))
    context = multiprocessing.get_context("fork")
    found = context.Queue()

    def load() -> None:
        data = load_datasets(config, tokenizer, quiet=True)
        found.put((len(data.train), data.train_report.fingerprint))

    ranks = [context.Process(target=load) for _ in range(3)]
    for rank in ranks:
        rank.start()
    results = [found.get(timeout=120) for _ in ranks]
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    assert len(set(results)) == 1
    assert len(list((tmp_path / "cache").glob("rows-*"))) == 1


@pytest.mark.parametrize("form", ["jsonl.gz", "parquet", "json", "saved", "saved_dict", "directory", "glob"])
def test_sources_of_every_form_give_the_same_rows(tokenizer, tmp_path, form: str) -> None:
    import gzip

    import datasets

    rows = rows_of(12)
    expected, _ = load_rows(write(tmp_path / "plain.jsonl", rows), tokenizer)
    place = tmp_path / "x"
    place.mkdir()
    path = place / f"data.{form}"
    if form == "jsonl.gz":
        path.write_bytes(gzip.compress((tmp_path / "plain.jsonl").read_bytes()))
    elif form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    elif form == "saved_dict":
        datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(str(path))
    else:
        write(place / "b.jsonl", rows[:5])
        write(place / "a.jsonl", rows[5:])
        path = place if form == "directory" else place / "*.jsonl"
    dataset, _ = load_rows(str(path), tokenizer)
    assert texts(tokenizer, dataset) == texts(tokenizer, expected)


def test_named_sets_are_streamed(tokenizer, tmp_path, monkeypatch) -> None:
    import datasets

    rows = rows_of(12)
    asked = []

    def load_dataset(path, name, split, streaming):
        asked.append((path, name, split, streaming))
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(train={"path": "org/chats", "name": "small"}, cache_dir=str(tmp_path / "cache"))
    expected, _ = load_rows(write(tmp_path / "plain.jsonl", rows), tokenizer)
    data = load_datasets(config, tokenizer, quiet=True)
    assert texts(tokenizer, data.train) == texts(tokenizer, expected)
    assert asked == [("org/chats", "small", "train", True)]
    load_datasets(config, tokenizer, quiet=True)
    assert len(asked) == 1, "prepared once"

    def unknown(*args, **kwargs):
        raise FileNotFoundError("Couldn't find any data file")

    monkeypatch.setattr(datasets, "load_dataset", unknown)
    with pytest.raises(DataError, match="no file here, and `datasets` cannot load it"):
        load_rows("org/missing", tokenizer, DataConfig(cache_dir=str(tmp_path / "cache")))


def test_columns_can_be_renamed_and_missing_sources_are_named(tokenizer, tmp_path) -> None:
    rows = [{"dialog": row["messages"]} for row in rows_of(5)]
    source = write(tmp_path / "a.jsonl", rows)
    assert len(load_rows(SourceConfig(path=source, columns={"messages": "dialog"}), tokenizer)[0]) == 5
    with pytest.raises(DataError, match="unknown_shape 5"):
        load_rows(source, tokenizer)
    with pytest.raises(DataError, match="no such file"):
        load_rows(str(tmp_path / "missing.jsonl"), tokenizer)
    with pytest.raises(ConfigError, match="max_length"):
        DataConfig(max_lenght=3)


def test_looping_rows(tokenizer, tmp_path) -> None:
    phrase = "one two three four five six "
    assert looping(phrase * 4)
    assert not looping(phrase * 3)
    assert not looping("one two three four five " * 3)
    assert looping("a " * 9)
    assert not looping("a " * 8)
    rows = [*rows_of(3), tiny.chat("Hello", phrase * 4), {**tiny.chat("Hello", "flagged"), "looping": True}]
    source = write(tmp_path / "a.jsonl", rows)
    assert load_rows(source, tokenizer)[1].looping_rows == 2
    dataset, report = load_rows(source, tokenizer, DataConfig(skip_looping=True))
    assert len(dataset) == 3
    assert report.skipped == {"looping": 2}
    assert report.bad == 0


def test_packing_joins_whole_conversations(tokenizer, tmp_path) -> None:
    source = write(tmp_path / "a.jsonl", rows_of(40))
    plain, plain_report = load_rows(source, tokenizer)
    packed, report = load_rows(source, tokenizer, DataConfig(pack=True, max_length=150))
    assert len(packed) < len(plain) / 2
    assert (report.tokens, report.supervised_tokens) == (plain_report.tokens, plain_report.supervised_tokens)
    assert report.rows_kept == 40
    pieces = []
    for row in packed:
        assert row["length"] <= 150
        for segment in range(row["segment_ids"].max() + 1):
            place = row["segment_ids"] == segment
            pieces.append((tuple(row["input_ids"][place]), tuple(row["loss_mask"][place])))
    assert sorted(pieces) == sorted((tuple(row["input_ids"]), tuple(row["loss_mask"])) for row in plain)


def test_packing_fills_rows_well() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 60, size=2000)
    samples = (Sample(np.zeros(n, np.int32), np.ones(n, np.bool_)) for n in lengths)
    rows = list(pack_samples(samples, 128))
    assert sum(len(row.input_ids) for row in rows) == lengths.sum()
    assert lengths.sum() / (128 * len(rows)) > 0.95


def test_collate_pads_on_the_right_and_restarts_positions(tokenizer) -> None:
    first, second = (render_row(row, tokenizer)[0] for row in rows_of(2, 4))
    batch = collate_rows([first, second], pad_token_id=9, pad_to_multiple_of=16)
    lengths = [len(first.input_ids), len(second.input_ids)]
    assert batch["input_ids"].shape[1] % 16 == 0
    for index, (row, length) in enumerate(zip((first, second), lengths, strict=True)):
        assert batch["input_ids"][index].tolist()[:length] == row.input_ids
        assert set(batch["input_ids"][index].tolist()[length:]) <= {9}
        assert batch["attention_mask"][index].sum() == length
        assert batch["loss_mask"][index].sum() == sum(row.loss_mask)
        assert batch["position_ids"][index].tolist()[:length] == list(range(length))
    assert batch["segment_ids"] is None

    packed = {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [False] * 5, "segment_ids": [0, 0, 0, 1, 1]}
    batch = collate_rows([packed, {"input_ids": [1, 2], "loss_mask": [True, True]}], pad_token_id=0)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    with pytest.raises(DataError, match="at least one"):
        collate_rows([], 0)
    with pytest.raises(DataError, match="row 1"):
        collate_rows([packed, {"input_ids": [1, 2], "loss_mask": [True]}], 0)


def test_prompt_files(tmp_path) -> None:
    rows = [
        {"turns": ["a", "b"]},
        {"prompt": "c"},
        tiny.chat("d", "e", "f"),
        {"conversations": [{"from": "human", "value": "g"}]},
    ]
    path = write(tmp_path / "p.jsonl", rows)
    assert read_prompts(path) == [("a", "b"), ("c",), ("d", "f"), ("g",)]
    assert read_prompts(path, limit=1) == [("a", "b")]
    with pytest.raises(DataError, match=r"q.jsonl:2: no turns"):
        read_prompts(write(tmp_path / "q.jsonl", [{"prompt": "c"}, {"text": "x"}]))


def test_prompt_of_a_conversation_ignores_white_space() -> None:
    assert first_prompt(parse_row(tiny.chat(" Question \n 1?", "x"))) == "Question 1?"
