"""A small OpenAI-compatible server in a thread: its answers depend on the messages alone, and it can misbehave."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def answer_to(messages: list[dict[str, Any]]) -> str:
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
    return f"Answer {digest[:12]} to {messages[-1]['content']}"


class FakeServer:
    """``with FakeServer() as server``: ``server.url`` is its base_url.

    ``failures`` are statuses to give instead of answers, each once; ``delay`` is in seconds.
    """

    def __init__(self, delay: float = 0.0, failures: list[int] | None = None) -> None:
        self.delay = delay
        self.failures = list(failures or [])
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.in_flight = self.most_in_flight = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append(body)
                    outer.asked[body["messages"][-1]["content"]] += 1
                    outer.in_flight += 1
                    outer.most_in_flight = max(outer.most_in_flight, outer.in_flight)
                    status = outer.failures.pop(0) if outer.failures else 200
                time.sleep(outer.delay)
                with outer.lock:
                    outer.in_flight -= 1
                if status != 200:
                    self.reply(status, {"error": "no"})
                    return
                text = answer_to(body["messages"])
                reason = "length" if "LONG" in text else "stop"
                message = {"role": "assistant", "content": "" if "EMPTY" in text else text}
                if body.get("chat_template_kwargs", {}).get("enable_thinking"):
                    message["reasoning_content"] = "let me see"
                usage = {"completion_tokens": 7}
                self.reply(200, {"choices": [{"message": message, "finish_reason": reason}], "usage": usage})

            def reply(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client was killed

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *args: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def __enter__(self) -> FakeServer:
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.shutdown()
        self.http.server_close()
