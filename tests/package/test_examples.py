"""Scripts parse, the serving launcher prints each engine's line, and stored notebooks are those that run."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from modelopt_spec.training.train import train
from tests.training.tiny_run import make_target, recipe_values, write_chats, write_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.ipynb"))
QUICKEST = "04_own_head"


def load(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", sorted(EXAMPLES.rglob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o111, f"{script.name} is not executable"
    without = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "usage:" in without.stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    target, rows = make_target(root / "target"), write_chats(root / "rows.jsonl", 8)
    write_recipe(root / "recipe.yaml", recipe_values(target, rows, root / "run", max_steps=1))
    return train(root / "recipe.yaml", quiet=True).checkpoint


def test_launcher_prints_the_line_of_each_engine(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = load(EXAMPLES / "serving" / "launch.py")
    wanted = {
        "vllm": ["vllm serve", '"num_speculative_tokens": 4', '"method": "dspark"'],
        "sglang": ["sglang.launch_server", "--speculative-num-draft-tokens 5"],
        "llama.cpp": ["llama-server", "--spec-draft-n-max 4"],
        "tensorrt_llm": ["trtllm-serve", "max_draft_len: 4"],
    }
    assert set(wanted) == set(launch.ENGINES)
    for engine, parts in wanted.items():
        out = tmp_path / engine
        launch.main([str(checkpoint), "--engine", engine, "--out", str(out), "--dtype", "float32"])
        line = capsys.readouterr().out
        assert all(part in line for part in [*parts, str(out)]), line


def test_asking_a_server() -> None:
    ask = load(EXAMPLES / "serving" / "ask.py").ask

    class Server(BaseHTTPRequestHandler):
        def _reply(self, value: dict) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def do_GET(self) -> None:
            self._reply({"data": [{"id": "tiny"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = f"{asked['model']} heard {asked['messages'][0]['content']}"
            self._reply({"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}})

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        answer = ask(f"http://127.0.0.1:{server.server_port}/v1", "hello")
    finally:
        server.shutdown()
    assert answer["choices"][0]["message"]["content"] == "tiny heard hello"
    assert answer["seconds"] > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_its_outputs(path: Path) -> None:
    node = nbformat.read(path, as_version=4)
    nbformat.validate(node)
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    assert node.cells[0].cell_type == "markdown"
    assert all(cell.execution_count for cell in code), "not executed: python tools/notebooks.py"
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert "/tmp/" not in path.read_text(encoding="utf-8")
    assert path.name in (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")


def test_there_are_five_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05"]


def run_notebook(path: Path, place: Path) -> None:
    tool = load(ROOT / "tools" / "notebooks.py")
    shutil.copy(EXAMPLES / "notebooks" / "tiny.py", place)
    before = nbformat.read(path, as_version=4)
    after = tool.execute(path, place)
    assert [cell.source for cell in after.cells] == [cell.source for cell in before.cells]
    assert not [o for cell in after.cells for o in cell.get("outputs", []) if o.output_type == "error"]


@pytest.mark.timeout(900)
def test_quickest_notebook_runs(tmp_path: Path) -> None:
    run_notebook(next(path for path in NOTEBOOKS if path.stem == QUICKEST), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem != QUICKEST], ids=lambda path: path.stem)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    run_notebook(path, tmp_path)
