"""Features of a server: a stand-in for vLLM answers with the connector's own files, written from a real tiny target."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelopt_spec.data.collate import collate_rows
from modelopt_spec.errors import DataError
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.remote import RemoteFeatures, file_transfer, launch_arguments
from tests.data.test_feature_cache import TAPS, make_rows, online, pack
from tests.tiny import tiny

pytest.importorskip("hs_connectors")


class FakeVllm:
    """Answers completions like a server started with :func:`launch_arguments`."""

    def __init__(self, model, directory: Path, aux: list[int]) -> None:
        self.failures: list[int] = []
        self.prompts: list[list[int]] = []
        self.change_tokens = self.hide = False
        outer, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.prompts.append(body["prompt"])
                    number = len(outer.prompts)
                    status = outer.failures.pop(0) if outer.failures else 200
                    ids = torch.tensor([body["prompt"]])
                    collected: list[torch.Tensor] = []
                    hooks = [
                        layer.register_forward_hook(lambda m, a, out: collected.append(out))
                        for layer in model.model.layers
                    ]
                    with torch.no_grad():
                        model(ids)
                    for hook in hooks:
                        hook.remove()
                path = directory / f"req-{number}.safetensors"
                states = torch.stack([collected[i - 1][0] for i in aux], dim=1)
                tokens = ids[0] + 1 if outer.change_tokens else ids[0]
                save_file({"hidden_states": states.contiguous(), "token_ids": tokens}, path)
                params = {} if outer.hide else {"hidden_states_path": str(path)}
                data = json.dumps({"kv_transfer_params": params}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def served(tmp_path):
    model = tiny()
    arguments = launch_arguments("x", TAPS, model.config.num_hidden_layers, str(tmp_path))
    speculative = json.loads(arguments[arguments.index("--speculative-config") + 1])
    aux = speculative["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert aux == [2, 4, 6]
    server = FakeVllm(model, tmp_path, aux)
    target = open_target(model)
    source = RemoteFeatures(
        server.url, "x", TAPS, model.model.norm, file_transfer(str(tmp_path)), dtype=torch.float32, backoff=0.01
    )
    yield server, target, source, tmp_path
    server.http.shutdown()
    server.http.server_close()


def ask(source: RemoteFeatures, rows: list[dict]):
    batch = collate_rows(rows, pad_token_id=0)
    positions = batch["position_ids"] if batch["segment_ids"] is not None else None
    lengths = [len(row["input_ids"]) for row in rows]
    return source.features(batch["input_ids"], lengths, list(range(len(rows))), positions), lengths


@pytest.mark.parametrize("packed", [False, True])
def test_remote_features_are_those_of_the_target(served, packed: bool) -> None:
    server, target, source, folder = served
    rows = [pack(make_rows(3)), pack(make_rows(2, seed=1))] if packed else make_rows(4)
    server.failures = [500, 503]
    found, lengths = ask(source, rows)
    for b, row in enumerate(rows):
        expected = online(target, row)
        torch.testing.assert_close(found.taps[b, : lengths[b]], expected.taps, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.last_hidden[b, : lengths[b]], expected.last_hidden, rtol=1e-5, atol=1e-5)
        assert not found.taps[b, lengths[b] :].any()
    left = list(folder.glob("*.safetensors"))
    assert len(left) == 2, "only the files of the two failed answers are left"


def test_wrong_servers_are_refused(served) -> None:
    server, _, source, _ = served
    server.change_tokens = True
    with pytest.raises(DataError, match="other tokens"):
        ask(source, make_rows(1))
    server.change_tokens, server.hide = False, True
    with pytest.raises(DataError, match="returns no hidden states"):
        ask(source, make_rows(1))
    server.hide = False
    source.layer_ids = (1, 2, 3)
    with pytest.raises(DataError, match=r"shape \(\d+, 3, 32\), taps \[1, 2, 3\]"):
        ask(source, make_rows(1))
    server.failures = [404]
    with pytest.raises(DataError, match="answered 404"):
        ask(source, make_rows(1))
    server.failures = [500] * 9
    with pytest.raises(DataError, match="no features after 4 tries"):
        ask(source, make_rows(1))


def test_fp8_launch_line_names_the_connector_module() -> None:
    arguments = launch_arguments("m", (0,), 4, fp8=True)
    transfer = json.loads(arguments[-1])
    assert transfer["kv_connector_module_path"] == "hs_connectors.fp8_hidden_states_connector"
    assert arguments[:3] == ["vllm", "serve", "m"]
