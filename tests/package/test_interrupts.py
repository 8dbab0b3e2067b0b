"""Ctrl-C at any moment: one line and status 130. Each case is a process in which an import or a command presses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRESS = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"
SWALLOWED = (
    "import os, signal, time\n"
    "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(10)\n"
    "except KeyboardInterrupt:\n    raise ImportError('cannot import name of a module that is half there')\n"
)
TWICE = (
    "import os, signal, time\n"
    "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(10)\n"
    "except KeyboardInterrupt:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(10)\n"
)
IGNORED = (
    "import os, signal, time\n"
    "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(10)\n"
    "except BaseException:\n    pass\n"
    "time.sleep(100)\n"
)
WAITING = (
    "import os, signal, threading, time\n"
    "threading.Thread(target=time.sleep, args=(100,)).start()\n"
    "os.kill(os.getpid(), signal.SIGINT)\ntime.sleep(10)\n"
)


def mtsp(place: Path, module: str, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`mtsp ARGUMENTS` where importing ``module`` runs ``source``."""
    (place / f"{module}.py").write_text(source)
    code = (
        "import signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path[:0] = [{str(place)!r}]\nsys.argv[0] = 'mtsp'\n"
        "from modelopt_spec import interrupts\ninterrupts.GRACE_SECONDS = 2.0\n"
        "from modelopt_spec.__main__ import main\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    "source",
    [PRESS, SWALLOWED, TWICE, IGNORED, WAITING],
    ids=["at once", "as another error", "twice", "swallowed", "while a thread runs on"],
)
@pytest.mark.parametrize("module", ["typer", "torch"], ids=["at the start", "inside a command"])
def test_ctrl_c_is_one_line(tmp_path: Path, module: str, source: str) -> None:
    done = mtsp(tmp_path, module, source, "heads")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_training_says_how_to_go_on(tmp_path: Path) -> None:
    done = mtsp(tmp_path, "torch", PRESS, "train", "dspark/smollm2_135m", f"training.output_dir={tmp_path / 'run'}")
    assert done.returncode == 130
    assert done.stderr == "interrupted: the same command with --resume goes on from the newest checkpoint\n"


def test_an_error_without_ctrl_c_stays_one(tmp_path: Path) -> None:
    done = mtsp(tmp_path, "torch", "raise ImportError('broken installation')", "heads")
    assert done.returncode == 1
    assert "broken installation" in done.stderr
    assert "Traceback" in done.stderr
