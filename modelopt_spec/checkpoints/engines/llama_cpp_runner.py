"""Run an exported draft in llama.cpp's server on a CPU and read what the engine itself says about it.

tools = find_llama_cpp()
target, draft = cached_gguf(target_dir, tools), cached_gguf(draft_dir, tools, target_dir=target_dir)
settings = ServerSettings(target, draft, spec_type_of(draft_dir), num_draft_tokens=7)
with LlamaServer(tools, settings) as server:
    generation = server.generate(prompt_ids, max_new_tokens=128)
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from modelopt_spec.checkpoints.engines.llama_cpp_timings import Generation
from modelopt_spec.checkpoints.engines.llama_cpp_tools import LlamaCppTools
from modelopt_spec.errors import SpecError

__all__ = ["EngineError", "LlamaServer", "ServerSettings"]

SPEC_TYPES = ("draft-dspark", "draft-dflash")
START_ATTEMPTS = 3
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_ROUNDS_METRIC = re.compile(r"^llamacpp:spec_decode_num_drafts_total (\d+)", re.MULTILINE)


class EngineError(SpecError):
    """The engine did not start, stopped, or answered with an error; its log is kept and named."""


@dataclass(frozen=True)
class ServerSettings:
    """How the server is started."""

    target: Path
    """GGUF file of the target."""
    draft: Path | None = None
    """GGUF file of the draft; plain decoding without one."""
    spec_type: str = "draft-dspark"
    num_draft_tokens: int = 7
    """K, at most the draft's block size (the server would silently clamp it)."""
    threads: int = min(4, os.cpu_count() or 1)
    context_tokens: int = 4096
    exact: bool = True
    """Float32 caches and no flash attention: greedy tokens do not depend on the draft. False: the engine's defaults."""
    confidence_min: float | None = None
    """Stop a draft at the first slot whose confidence is below this; needs a confidence head."""
    start_timeout_s: float = 120.0
    request_timeout_s: float = 600.0
    extra_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.spec_type not in SPEC_TYPES:
            raise SpecError(f"spec_type is {self.spec_type!r}: use one of {', '.join(SPEC_TYPES)}")
        if self.num_draft_tokens < 1:
            raise SpecError(f"num_draft_tokens is {self.num_draft_tokens}: it must be at least 1")

    def command_line(self, server: Path, port: int) -> list[str]:
        """The full launch line."""
        command = [str(server), "-m", str(self.target), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-np", "1", "-ngl", "0", "-fit", "off", "-c", str(self.context_tokens), "-t", str(self.threads)]
        command += ["--metrics", "--no-webui", "--cache-ram", "0"]
        if self.exact:
            command += ["-fa", "off", "-ctk", "f32", "-ctv", "f32"]
        if self.draft is not None:
            command += ["-md", str(self.draft), "--spec-type", self.spec_type]
            command += ["--spec-draft-n-max", str(self.num_draft_tokens), "-ngld", "0"]
            if self.exact:
                command += ["-ctkd", "f32", "-ctvd", "f32"]
            if self.confidence_min is not None:
                command += ["--spec-draft-p-min", str(self.confidence_min)]
        return [*command, *self.extra_args]


class LlamaServer:
    """A running server; a context manager that always ends its process.

    On Linux the server also ends when the thread that started it does, even by SIGKILL.

    ``log`` is where the server writes; without one a temporary file is used, removed unless something failed.
    """

    def __init__(self, tools: LlamaCppTools, settings: ServerSettings, log: Path | None = None):
        for path in (settings.target, settings.draft):
            if path is not None and not path.is_file():
                raise EngineError(f"{path} does not exist: convert the directory to GGUF first")
        self.tools = tools
        self.settings = settings
        self._keep_log = log is not None
        if log is None:
            handle, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._url = ""

    # ---- life ----

    def start(self) -> Self:
        """Start the server and wait until the models are loaded."""
        for attempt in range(START_ATTEMPTS):
            port = _free_port()
            self._url = f"http://127.0.0.1:{port}"
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    self.settings.command_line(self.tools.server, port),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.tools.server_environment(),
                    start_new_session=True,
                    preexec_fn=_end_with_parent,
                )
            if self._wait_until_ready():
                return self
            lost_the_port = "bind" in self._log_tail(50)
            self.stop()
            if not lost_the_port or attempt == START_ATTEMPTS - 1:
                break
        raise self._error("the server did not start")

    def _wait_until_ready(self) -> bool:
        deadline = time.monotonic() + self.settings.start_timeout_s
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                return False
            try:
                if self._request("/health", timeout=5.0).get("status") == "ok":
                    return True
            except (urllib.error.URLError, OSError, ValueError):
                pass  # not listening yet, or 503 while the models load
            time.sleep(0.1)
        return False

    def stop(self) -> None:
        """End the process; safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if kind is None and not self._keep_log:
            self.log.unlink(missing_ok=True)

    # ---- requests ----

    def generate(self, prompt: Sequence[int] | str, *, max_new_tokens: int, ignore_eos: bool = False) -> Generation:
        """Greedy answer to a prompt of token ids (or of text, which the engine tokenises)."""
        before = self._verified_rounds()
        reply = self._post(
            "/completion",
            {
                "prompt": prompt if isinstance(prompt, str) else [int(token) for token in prompt],
                "n_predict": max_new_tokens,
                "temperature": 0.0,
                "ignore_eos": ignore_eos,
                "cache_prompt": False,
                "return_tokens": True,
            },
        )
        after = self._verified_rounds()
        timings = reply["timings"]
        return Generation(
            tokens=tuple(reply["tokens"]),
            stopped_at_eos=reply["stop_type"] == "eos",
            max_new_tokens=max_new_tokens,
            draft_n=timings.get("draft_n", 0),
            draft_n_accepted=timings.get("draft_n_accepted", 0),
            predicted_ms=timings["predicted_ms"],
            prompt_ms=timings["prompt_ms"],
            verified_rounds=None if before is None or after is None else after - before,
        )

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a chat under the template in the GGUF file, ready for the assistant's answer."""
        text = self._post("/apply-template", {"messages": list(messages)})["prompt"]
        return self._post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def _verified_rounds(self) -> int | None:
        """The server's running total of verification rounds, None where the build does not publish it."""
        try:
            with self._opener.open(self._url + "/metrics", timeout=30.0) as reply:
                found = _ROUNDS_METRIC.search(reply.read().decode())
        except (urllib.error.URLError, OSError) as error:
            raise self._error(f"/metrics failed: {error}") from error
        return int(found.group(1)) if found else None

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._request(path, body, timeout=self.settings.request_timeout_s)
        except urllib.error.HTTPError as error:
            raise self._error(f"{path} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise self._error(f"{path} failed: {error}") from error

    def _request(self, path: str, body: dict[str, Any] | None = None, *, timeout: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with self._opener.open(request, timeout=timeout) as reply:
            return json.load(reply)

    def _error(self, what: str) -> EngineError:
        code = None if self._process is None else self._process.poll()
        state = "" if code is None else f" (exit status {code})"
        return EngineError(f"llama-server: {what}{state}; log {self.log}, its last lines:\n{self._log_tail(15)}")

    def _log_tail(self, lines: int) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


def _end_with_parent() -> None:
    """In the new process: ask the kernel for SIGKILL once the starting thread is gone."""
    if _PRCTL is not None:
        _PRCTL(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
