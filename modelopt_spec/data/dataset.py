"""Token rows for a trainer: prepared once, then read row by row."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.build import Progress, Split, build_splits
from modelopt_spec.data.chat import template_text
from modelopt_spec.data.config import DataConfig, SourceConfig
from modelopt_spec.data.report import DataReport
from modelopt_spec.data.sources import source_bytes, source_files
from modelopt_spec.data.store import SampleStore, ShardInfo, load_shards
from modelopt_spec.disk import sha256_of
from modelopt_spec.errors import DataError
from modelopt_spec.progress import progress

__all__ = [
    "TokenData",
    "load_datasets",
    "load_rows",
    "open_prepared",
    "prepare",
    "template_fingerprint",
    "tokenizer_fingerprint",
]

REJECTS = "rejects.jsonl"
MANIFEST = "data.json"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES})
VERSION = 1


@dataclass(frozen=True)
class TokenData:
    """The splits of a data configuration.

    Datasets are map-style; ``dataset[i]`` gives numpy arrays input_ids [S] int32, loss_mask [S] bool, ``length`` and
    segment_ids [S] in packed sets.
    """

    train: datasets.Dataset
    validation: datasets.Dataset | None
    train_report: DataReport
    validation_report: DataReport | None
    identity: dict[str, str]
    """tokenizer and template: sha256 of what the tokens depend on."""


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of a tokenizer's own file, or of its vocabulary where it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None) if tokenizer.is_fast else None
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        return hashlib.sha256(backend.to_str().encode()).hexdigest()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def template_fingerprint(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> str:
    """sha256 of the chat template and the settings that change what it prints."""
    text = template_text(config.chat_template) or tokenizer.chat_template or ""
    values = [text, config.template_kwargs, config.date, config.system_role]
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def load_rows(
    sources: str | SourceConfig | Sequence[str | SourceConfig],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig | None = None,
) -> tuple[datasets.Dataset, DataReport]:
    """Token rows of some sources with everything else as ``config`` says; no row is held out.

    Raises:
        DataError: no usable row, too many bad ones, or a source that cannot be read.
    """
    listed = [sources] if isinstance(sources, str | SourceConfig) else list(sources)
    settings = (config or DataConfig()).replace(train=listed, validation=(), validation_share=0.0)
    data = load_datasets(settings, tokenizer, quiet=True)
    return data.train, data.train_report


def load_datasets(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    quiet: bool = False,
    rejects: str | Path | None = None,
) -> TokenData:
    """Both splits of a configuration.

    Sets of up to ``data.memory_mb`` of text are made in memory. Larger ones, and `datasets` names, are prepared once in
    ``data.cache_dir`` (else the user's cache directory) and mapped from there, so memory stays flat while training.
    A directory that :func:`prepare` wrote is opened as it is.

    Args:
        config: the ``data`` section.
        tokenizer: the target's.
        quiet: no progress bar.
        rejects: write the unusable rows here as JSON lines: ``source``, ``row`` (and of JSON lines ``line``),
            ``reason``, ``detail``. Empty where every row can be used.

    Raises:
        DataError: no usable row, too many bad ones, or a source that cannot be read.
    """
    file = None if rejects is None else Path(rejects).expanduser()
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")
    if not config.train:
        raise DataError("data.train is empty: name at least one file, directory or data set")
    if len(config.train) == 1 and (Path(config.train[0].path).expanduser() / MANIFEST).is_file():
        prepared = Path(config.train[0].path).expanduser()
        _copy_rejects(prepared, file)
        return open_prepared(prepared, tokenizer, config)
    sizes = [source_bytes(source) for source in (*config.train, *config.validation)]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and sum(known) <= config.memory_mb << 20 and config.cache_dir is None:
        with _bar("data", quiet) as advance:
            splits = build_splits(config, tokenizer, progress=advance, rejects_file=file)
        return _token_data(splits, _identity(tokenizer, config))
    directory = Path(config.cache_dir).expanduser() if config.cache_dir else _cache_root()
    target = directory / f"rows-{_cache_key(config, tokenizer)}"
    with _only_one(target):
        if not (target / MANIFEST).is_file():
            prepare(config, tokenizer, target, quiet=quiet)
    _copy_rejects(target, file)
    data = open_prepared(target, tokenizer, config)
    for split, report in (("train", data.train_report), ("validation", data.validation_report)):
        if report is not None and report.bad_share > config.max_bad_share:
            raise DataError(
                f"{report.bad} of {report.rows_read} rows of {split} cannot be used, more than data.max_bad_share "
                f"{config.max_bad_share}: {report.examples}; all of them: {target / REJECTS}"
            )
    return data


def _copy_rejects(directory: Path, file: Path | None) -> None:
    if file is not None and (directory / REJECTS).is_file():
        shutil.copyfile(directory / REJECTS, file)


def _check_replaceable(out: Path, config: DataConfig) -> None:
    """Refuse to replace what is not prepared rows, or holds a source of the rows."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / MANIFEST).is_file()):
        raise DataError(
            f"{str(out)!r} holds something else than prepared rows (there is no {MANIFEST}), which overwriting would "
            "delete: choose another directory, or remove it"
        )
    for source in (*config.train, *config.validation):
        if Path(source.path).expanduser().resolve().is_relative_to(out.resolve()):
            raise DataError(f"{str(out)!r} holds the source {source.path!r}: choose another directory")


def prepare(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    *,
    overwrite: bool = False,
    quiet: bool = False,
) -> TokenData:
    """Write token rows to a directory for :func:`load_datasets`: Arrow shards, ``data.json`` and ``rejects.jsonl``.

    The directory appears whole or not at all; a rejects file of a run that failed is left beside it.

    Raises:
        DataError: ``out_dir`` exists and ``overwrite`` is off, it holds something else than prepared rows or what is
            read, or the rows cannot be used.
    """
    out = Path(out_dir).expanduser()
    if out.exists() and not overwrite:
        raise DataError(f"{str(out)!r} exists already: choose another directory or allow overwriting")
    _check_replaceable(out, config)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{uuid.uuid4().hex[:8]}"
    failed = out.parent / f"{out.name}.rejects.jsonl"
    try:
        with _bar("data", quiet) as advance:
            splits = build_splits(config, tokenizer, partial, advance, rejects_told=failed)
        manifest = {
            "kind": "mtsp.data",
            "version": VERSION,
            "identity": _identity(tokenizer, config),
            "config": config.replace(chat_template=template_text(config.chat_template)).model_dump(mode="json"),
            "splits": {
                name: {
                    "packed": split.store.packed,
                    "shards": [dataclasses.asdict(shard) for shard in split.store.shards],
                    "report": split.report().to_dict(),
                }
                for name, split in splits.items()
            },
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
        for split in splits.values():
            split.dataset = None
        old = partial.with_name(f"{partial.name}.old")
        if out.exists():
            os.rename(out, old)
        try:
            os.rename(partial, out)
        except OSError:
            if old.exists():
                os.rename(old, out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        if (partial / REJECTS).is_file():
            os.replace(partial / REJECTS, failed)
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise DataError(
                f"the rows could not be written to {str(out.parent)!r} ({error.strerror}): choose another directory or "
                "make room. Shuffling a set over disk takes as much again as its text"
            ) from error
        raise
    return open_prepared(out)


def open_prepared(
    directory: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: DataConfig | None = None,
    verify: bool = False,
) -> TokenData:
    """Open a prepared directory without reading its rows.

    Args:
        directory: what :func:`prepare` wrote.
        tokenizer: if given, it and its template must be those that made the rows.
        config: if given, what it sets for template and supervision must be what the rows were made with; settings that
            it leaves at their default follow the rows.
        verify: read every shard and compare checksums.

    Raises:
        DataError: not a prepared directory, a missing or damaged shard, or another tokenizer or template.
    """
    path = Path(directory).expanduser()
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{str(path)!r} is not a prepared data directory ({error})") from None
    if manifest.get("kind") != "mtsp.data" or manifest.get("version") != VERSION:
        raise DataError(
            f"{str(path / MANIFEST)!r} is of kind {manifest.get('kind')!r} version {manifest.get('version')!r}"
        )
    identity = manifest["identity"]
    recorded = DataConfig(**manifest["config"])
    if config is not None:
        _check_settings(path, config, recorded)
    if tokenizer is not None:
        current = _identity(tokenizer, recorded)
        for name in ("tokenizer", "template"):
            if identity[name] != current[name]:
                raise DataError(
                    f"{str(path)!r} was prepared with another {name} (sha256 {identity[name][:12]}, now "
                    f"{current[name][:12]}): prepare it again for this target"
                )
    splits = {}
    for name, entry in manifest["splits"].items():
        shards = [ShardInfo(**shard) for shard in entry["shards"]]
        for shard in shards:
            _check_shard(path / name / shard.file, shard, verify)
        splits[name] = load_shards(path / name, shards, SampleStore(packed=entry["packed"]).schema)
    reports = {name: DataReport.from_dict(entry["report"]) for name, entry in manifest["splits"].items()}
    if config is not None and reports["train"].longest > config.max_length:
        raise DataError(
            f"{str(path)!r} has rows of up to {reports['train'].longest} tokens, data.max_length is "
            f"{config.max_length}: raise it or prepare the rows again"
        )
    return TokenData(splits["train"], splits.get("validation"), reports["train"], reports.get("validation"), identity)


def _check_settings(path: Path, config: DataConfig, recorded: DataConfig) -> None:
    """What a configuration sets must be what the rows were made with; what it leaves at its default follows them."""
    for name in ("chat_template", "template_kwargs", "date", "system_role", "supervise", "rewrites", "pack"):
        wanted = template_text(config.chat_template) if name == "chat_template" else getattr(config, name)
        if wanted not in (getattr(DataConfig(), name), getattr(recorded, name)):
            raise DataError(
                f"{str(path)!r} was prepared with data.{name} {getattr(recorded, name)!r}, now it is {wanted!r}: "
                "prepare the rows again or leave the setting out"
            )


def _check_shard(file: Path, shard: ShardInfo, verify: bool) -> None:
    if not file.is_file() or file.stat().st_size != shard.bytes:
        raise DataError(
            f"data shard {str(file)!r} is missing or cut short ({shard.bytes} bytes expected): prepare again"
        )
    if verify and sha256_of(file) != shard.sha256:
        raise DataError(f"data shard {str(file)!r} is damaged (sha256 differs): prepare again")


def _token_data(splits: dict[str, Split], identity: dict[str, str]) -> TokenData:
    train, validation = splits["train"], splits.get("validation")
    assert train.dataset is not None
    return TokenData(
        train.dataset,
        validation.dataset if validation else None,
        train.report(),
        validation.report() if validation else None,
        identity,
    )


def _identity(tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> dict[str, str]:
    return {"tokenizer": tokenizer_fingerprint(tokenizer), "template": template_fingerprint(tokenizer, config)}


@contextlib.contextmanager
def _bar(name: str, quiet: bool) -> Iterator[Progress]:
    """Counts rows on a progress bar: each is read once and tokenized once."""
    with progress(name, None, quiet=quiet) as advance:
        yield lambda stage, count: advance(count if stage == "tokenize" else 0, note=stage)


@contextlib.contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Let one process (of the ranks of a node, say) prepare a directory while the others wait for it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # no advisory locks on this platform
        yield
        return
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _cache_root() -> Path:
    from modelopt_spec.targets.packaged import cache_root

    return cache_root() / "data"


def _cache_key(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    ignored = {"num_workers", "memory_mb", "cache_dir", "max_bad_share"}
    files = [
        [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
        for source in (*config.train, *config.validation)
        for file in source_files(source)
    ]
    settings: dict[str, Any] = {k: v for k, v in config.model_dump(mode="json").items() if k not in ignored}
    values = [VERSION, settings, files, _identity(tokenizer, config)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:24]
