"""Without a network the hub is asked once, and what is cached is still found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from modelopt_spec.errors import CheckpointError
from modelopt_spec.targets import hub
from modelopt_spec.targets.load import load_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def closed_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def test_a_server_is_reachable_while_it_listens(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub._PROXIES:
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert hub.reachable.__wrapped__(f"http://127.0.0.1:{server.getsockname()[1]}")
    assert not hub.reachable.__wrapped__(f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert hub.reachable.__wrapped__(f"http://127.0.0.1:{closed_port}"), "the proxy decides"


def test_directories_ask_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "reachable", lambda address: False)
    hub.offline_if_unreachable(str(tmp_path))
    assert not constants.HF_HUB_OFFLINE
    hub.offline_if_unreachable("somebody/model")
    assert constants.HF_HUB_OFFLINE


def test_a_plan_without_a_network_is_one_line(closed_port: int, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in (*hub._PROXIES, "HF_HUB_OFFLINE")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{closed_port}"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "modelopt_spec",
            "plan",
            "dspark/qwen3_8b",
            "--rows",
            "100",
            "--quiet",
        ],  # no sign of life where it is slow
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "cannot read the config of the target 'Qwen/Qwen3-8B'" in done.stderr
    assert "Retrying" not in done.stderr


def test_a_target_that_is_nowhere_is_said_to_be_no_directory_either(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="'nowhere': there is no such directory, and from the hub"):
        load_target("nowhere")
