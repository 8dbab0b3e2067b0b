"""The installer of the engines: quick when nothing is to do, clear when something fails, nothing half done kept."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "engines"

pytestmark = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="the engines are pinned for Linux x86_64"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the installer and one small pinned package in place of the engines."""
    folder = tmp_path / "tools" / "engines"
    folder.mkdir(parents=True)
    shutil.copy(TOOLS / "install.sh", folder)
    (folder / "llamacpp.txt").write_text(f"nothing-of-this-name==1.0 --hash=sha256:{'0' * 64}\n")
    (folder / "vllm.txt").write_text("")
    return tmp_path


def install(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(checkout)} | environment
    script = str(checkout / "tools" / "engines" / "install.sh")
    return subprocess.run([script, *arguments], env={**os.environ, **settings}, capture_output=True, text=True)


def test_a_failed_installation_says_why_and_is_not_taken_for_a_finished_one(checkout: Path) -> None:
    stamp = checkout / ".venvs" / "llamacpp" / "installed"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("3.11 other pins\n")
    done = install(checkout, "llamacpp")
    assert done.returncode == 1
    assert "nothing-of-this-name" in done.stderr, "pip's own message"
    assert "could not install the files pinned in" in done.stderr
    assert "the next call starts it anew" in done.stderr
    assert not stamp.exists()


def test_an_installation_of_the_same_pins_is_left_alone(checkout: Path) -> None:
    environment = checkout / ".venvs" / "llamacpp"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    digest = subprocess.run(
        ["sha256sum", str(checkout / "tools" / "engines" / "llamacpp.txt")], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    (environment / "installed").write_text(f"{sys.version_info.major}.{sys.version_info.minor} {digest}\n")
    done = install(checkout, "llamacpp")
    assert (done.returncode, done.stdout.strip()) == (0, f"llamacpp: {environment} is up to date")


def test_wrong_calls(checkout: Path) -> None:
    for arguments in ((), ("sglang",), ("vllm", "llamacpp")):
        done = install(checkout, *arguments)
        assert done.returncode == 2 and "usage:" in done.stderr


def test_vllm_names_the_python_that_its_lock_is_for(checkout: Path) -> None:
    other = checkout / "python3"
    other.write_text('#!/bin/sh\ncase "$2" in *version_info*) echo 3.12 ;; *) echo "Linux x86_64" ;; esac\n')
    other.chmod(0o755)
    done = install(checkout, "vllm", PYTHON=str(other))
    assert done.returncode == 1 and "locked for Python 3.11" in done.stderr and "set PYTHON" in done.stderr


@pytest.mark.parametrize("pins", ["llamacpp.txt", "vllm.txt"])
def test_every_file_is_pinned_by_hash(pins: str) -> None:
    lines = [line for line in (TOOLS / pins).read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"\S+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
