import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelopt_spec.checkpoints.atomic import atomic_directory, check_free
from modelopt_spec.errors import CheckpointError


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_appears_when_the_block_ends(tmp_path):
    with atomic_directory(tmp_path / "a" / "out") as work:
        (work / "file").write_text("x")
        assert not (tmp_path / "a" / "out").exists()
    assert (tmp_path / "a" / "out" / "file").read_text() == "x"
    assert names(tmp_path / "a") == ["out"]


def write_and_fail(out: Path, *, overwrite: bool = False, during=lambda: None) -> None:
    with atomic_directory(out, overwrite=overwrite) as work:
        (work / "new").write_text("new")
        during()
        raise RuntimeError


def test_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError):
        write_and_fail(tmp_path / "out")
    assert names(tmp_path) == []


def test_permissions_are_those_of_an_ordinary_directory(tmp_path):
    (tmp_path / "plain").mkdir()
    with atomic_directory(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_full_directory_is_refused_before_anything_is_created(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(CheckpointError, match="overwrite"), atomic_directory(tmp_path / "out"):
        pytest.fail("the block must not run")
    assert names(tmp_path) == ["out"]


def test_empty_directory_is_used(tmp_path):
    (tmp_path / "out").mkdir()
    with atomic_directory(tmp_path / "out") as work:
        (work / "new").write_text("new")
    assert names(tmp_path / "out") == ["new"]


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite_keeps_the_old_one_until_the_new_is_complete(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr("modelopt_spec.checkpoints.atomic._exchange", lambda a, b: False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").write_text("old")
    seen = []
    with pytest.raises(RuntimeError):
        write_and_fail(out, overwrite=True, during=lambda: seen.extend(names(out)))
    assert seen == names(out) == ["old"]
    with atomic_directory(out, overwrite=True) as work:
        (work / "new").write_text("new")
    assert names(out) == ["new"]
    assert names(tmp_path) == ["out"]


def test_symlink_keeps_pointing_at_its_directory(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "old").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_directory(tmp_path / "link", overwrite=True) as work:
        (work / "new").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["new"]


def test_files_and_living_rooms_are_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        check_free(tmp_path / "file", overwrite=True)
    (tmp_path / "cwd" / "inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd" / "inner")
    with pytest.raises(CheckpointError, match="would delete"):
        check_free(tmp_path / "cwd", overwrite=True)


KILLED = """
import sys, time
from modelopt_spec.checkpoints.atomic import atomic_directory
with atomic_directory(sys.argv[1], overwrite=True) as work:
    (work / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("had", [False, True])
def test_killed_process_leaves_the_place_as_it_was(tmp_path, had):
    out = tmp_path / "out"
    if had:
        out.mkdir()
        (out / "old").write_text("old")
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(out)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert (names(out) == ["old"]) if had else not out.exists()
