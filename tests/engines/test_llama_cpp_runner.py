"""The server's life and its errors, played by a small script in place of llama.cpp."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modelopt_spec.checkpoints.engines.llama_cpp_runner import EngineError, LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import (
    LlamaCppTools,
    cached_gguf,
    convert_to_gguf,
    find_llama_cpp,
    spec_type_of,
)
from modelopt_spec.errors import SpecError, UnsupportedError

SERVER = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
mode = {mode!r}
if mode == "dies":
    print("cannot load the model"); sys.exit(3)
started, rounds = time.time(), 0
class Handler(BaseHTTPRequestHandler):
    def reply(self, code, body):
        data = body.encode()
        self.send_response(code); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/metrics":
            line = "" if mode == "no counter" else "llamacpp:spec_decode_num_drafts_total %d" % rounds
            self.reply(200, "# HELP x\\n" + line + "\\n")
        elif mode == "never ready" or time.time() - started < 0.3:
            self.reply(503, json.dumps({{"error": "loading"}}))
        else:
            self.reply(200, json.dumps({{"status": "ok"}}))
    def do_POST(self):
        global rounds
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "error":
            self.reply(500, "the cache is full"); return
        if mode == "exits":
            print("out of memory", flush=True); import os; os._exit(9)
        rounds += 2
        timings = {{"predicted_ms": 30.0, "prompt_ms": 5.0, "draft_n": 14, "draft_n_accepted": 3}}
        tokens = [len(body["prompt"]), body["n_predict"], 2]
        self.reply(200, json.dumps({{"tokens": tokens, "stop_type": "eos", "timings": timings}}))
    def log_message(self, *args): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


def fake(tmp_path: Path, mode: str, gguf: Path, **settings: object) -> LlamaServer:
    script = tmp_path / "llama-server"
    script.write_text(f"#!{sys.executable}\n" + SERVER.format(mode=mode))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return LlamaServer(
        LlamaCppTools(script, tmp_path / "convert_hf_to_gguf.py"),
        ServerSettings(gguf, **settings),  # type: ignore[arg-type]
        log=tmp_path / "server.log",
    )


def test_one_request(tmp_path: Path, gguf: Path) -> None:
    with fake(tmp_path, "works", gguf) as server:
        process = server._process
        assert process is not None
        generation = server.generate([5, 6, 7], max_new_tokens=9)
    assert generation.tokens == (3, 9, 2)
    assert (generation.draft_n, generation.draft_n_accepted, generation.verified_rounds) == (14, 3, 2)
    assert generation.stopped_at_eos
    assert generation.max_new_tokens == 9
    assert process.poll() is not None, "the server must be gone"
    server.stop()  # a second time is fine


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent-death signal")
def test_the_server_ends_with_a_killed_parent(tmp_path: Path, gguf: Path) -> None:
    fake(tmp_path, "works", gguf)  # writes the script
    program = f"""
import sys
from pathlib import Path
from modelopt_spec.checkpoints.engines.llama_cpp_runner import LlamaServer, ServerSettings
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools
tools = LlamaCppTools(Path({str(tmp_path / "llama-server")!r}), Path())
server = LlamaServer(tools, ServerSettings(Path({str(gguf)!r})))
server.start()
print(server._process.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    server = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and Path(f"/proc/{server}/stat").exists():
        if Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{server}/stat").exists(), "the server outlived its parent"


def test_a_build_without_the_counter(tmp_path: Path, gguf: Path) -> None:
    with fake(tmp_path, "no counter", gguf) as server:
        assert server.generate([1], max_new_tokens=4).verified_rounds is None


def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(EngineError, match=r"did not start.*server\.log(.|\n)*cannot load the model"):
        fake(tmp_path, "dies", gguf).start()


def test_a_server_that_is_never_ready_is_stopped(tmp_path: Path, gguf: Path) -> None:
    server = fake(tmp_path, "never ready", gguf, start_timeout_s=1.0)
    with pytest.raises(EngineError, match="did not start"):
        server.start()
    assert server._process is None


def test_errors_of_a_request(tmp_path: Path, gguf: Path) -> None:
    with (
        fake(tmp_path, "error", gguf) as server,
        pytest.raises(EngineError, match="/completion answered 500: the cache is full"),
    ):
        server.generate([1], max_new_tokens=4)
    with (
        pytest.raises(EngineError, match=r"/completion failed(.|\n)*out of memory"),
        fake(tmp_path, "exits", gguf) as server,
    ):
        server.generate([1], max_new_tokens=4)
    assert server._process is None


def test_settings_name_what_is_wrong(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(SpecError, match="spec_type is 'dspark': use one of draft-dspark, draft-dflash"):
        ServerSettings(gguf, spec_type="dspark")
    with pytest.raises(SpecError, match="num_draft_tokens is 0"):
        ServerSettings(gguf, num_draft_tokens=0)
    with pytest.raises(EngineError, match=r"draft\.gguf does not exist"):
        LlamaServer(LlamaCppTools(tmp_path, tmp_path), ServerSettings(gguf, tmp_path / "draft.gguf"))


def test_command_line(gguf: Path) -> None:
    exact = ServerSettings(gguf, gguf, "draft-dflash", 5).command_line(Path("llama-server"), 1234)
    text = " ".join(exact)
    assert f"-m {gguf} --host 127.0.0.1 --port 1234 -np 1 -ngl 0" in text
    assert "-fa off -ctk f32 -ctv f32" in text
    assert f"-md {gguf} --spec-type draft-dflash --spec-draft-n-max 5" in text
    assert "-ctkd f32 -ctvd f32" in text
    fast = ServerSettings(gguf, exact=False).command_line(Path("llama-server"), 1234)
    assert not {"-fa", "-md", "-ctk"} & set(fast)


def test_spec_type_follows_the_anchor(tmp_path: Path) -> None:
    for architecture, expected in (("Qwen3DSparkModel", "draft-dspark"), ("DFlashDraftModel", "draft-dflash")):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert spec_type_of(tmp_path) == expected


def test_missing_tools_say_how_to_install_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"run tools/engines/install\.sh llamacpp"):
        find_llama_cpp(tmp_path)
    monkeypatch.setenv("MTSP_LLAMACPP", str(tmp_path / "elsewhere"))
    with pytest.raises(UnsupportedError, match="elsewhere"):
        find_llama_cpp()


def converter(tmp_path: Path, body: str) -> LlamaCppTools:
    script = tmp_path / "convert_hf_to_gguf.py"
    script.write_text("import sys, os\nout = sys.argv[sys.argv.index('--outfile') + 1]\n" + body)
    return LlamaCppTools(tmp_path / "llama-server", script)


def test_conversion_is_atomic_and_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MTSP_CACHE", str(tmp_path / "cache"))
    model, target = tmp_path / "model", tmp_path / "target"
    for folder in (model, target):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    tools = converter(tmp_path, "open(out, 'w').write(' '.join(sys.argv[1:-2]))\n")
    first = cached_gguf(model, tools, target_dir=target, dtype="bf16")
    assert first.read_text() == f"{model} --outtype bf16 --target-model-dir {target}"
    stamp = first.stat().st_mtime_ns
    assert cached_gguf(model, tools, target_dir=target, dtype="bf16") == first
    assert first.stat().st_mtime_ns == stamp
    (model / "model.safetensors").write_bytes(b"changed")
    assert cached_gguf(model, tools, target_dir=target, dtype="bf16") != first
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".tmp")]
    with pytest.raises(SpecError, match="dtype is 'q4'"):
        cached_gguf(model, tools, dtype="q4")


def test_a_refused_conversion_leaves_nothing(tmp_path: Path) -> None:
    body = "open(out, 'w').write('half')\nprint('ValueError: unsupported head')\nsys.exit(1)\n"
    output = tmp_path / "out" / "draft.gguf"
    with pytest.raises(UnsupportedError, match="unsupported head"):
        convert_to_gguf(tmp_path, output, converter(tmp_path, body))
    assert os.listdir(output.parent) == []
