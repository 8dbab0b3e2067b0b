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
from modelopt_spec.errors import DataError, UnsupportedError
from modelopt_spec.targets.base import open_target
from modelopt_spec.targets.ends import load_ends
from modelopt_spec.targets.load import load_target
from modelopt_spec.targets.remote import RemoteFeatures, file_transfer, launch_arguments
from modelopt_spec.training.plan import plan
from modelopt_spec.training.train import train
from tests.data.test_feature_cache import TAPS, make_rows, online, pack
from tests.tiny import tiny
from tests.training.tiny_run import losses, make_recipe, make_target, state_of, write_chats

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


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture
def material(tmp_path) -> tuple[Path, Path]:
    return make_target(tmp_path / "target"), write_chats(tmp_path / "chats.jsonl", 12)


@pytest.fixture
def server(material, tmp_path):
    folder = tmp_path / "states"
    folder.mkdir()
    fake = FakeVllm(load_target(str(material[0]), dtype="float32"), folder, [1, 3, 4])
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def test_ends_are_those_of_the_target_and_its_layers_are_not_there(material) -> None:
    whole, ends = load_target(str(material[0])), load_ends(str(material[0]))
    expected, found = open_target(whole), open_target(ends)
    assert found.shape == expected.shape
    ids, hidden = torch.arange(12), torch.randn(3, 32)
    assert torch.equal(found.embed(ids), expected.embed(ids))
    assert torch.equal(found.logits(hidden), expected.logits(hidden))
    assert not any("layers" in name for name in ends.state_dict())
    assert ends.config.to_dict() == whole.config.to_dict()
    with pytest.raises(UnsupportedError, match="without its layers"):
        found.features(ids[None], (0, 2))


@pytest.mark.parametrize("mode", ["dspark", "domino"])
def test_a_recipe_trains_from_a_server_as_from_the_target(material, server, tmp_path, mode: str) -> None:
    remote = {"base_url": server.url, "model": "x", "directory": str(tmp_path / "states"), "backoff": 0.01}
    found = train(make_recipe(*material, tmp_path / "remote", mode, features="remote", remote=remote), quiet=True)
    expected = train(make_recipe(*material, tmp_path / "online", mode), quiet=True)
    assert len(server.prompts) == 6 * 4, "one request a row and step"
    assert losses(found.report) == pytest.approx(losses(expected.report), rel=1e-5)
    for name, tensor in state_of(expected.model.drafter).items():
        torch.testing.assert_close(found.model.drafter.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)
    assert list((tmp_path / "states").iterdir()) == [], "what was read is removed"


def test_a_plan_leaves_the_layers_to_the_server(material, tmp_path) -> None:
    here = plan(make_recipe(*material, tmp_path / "run"))
    there = plan(make_recipe(*material, tmp_path / "run", features="remote"))
    assert there["flops"]["by_part"]["target"] == 0
    assert there["memory"]["rank"]["target"] < here["memory"]["rank"]["target"]
