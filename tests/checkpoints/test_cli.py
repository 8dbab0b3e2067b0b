"""The commands that write, read and check drafts, on a run of a second: exit status, JSON and files."""

import json
import pickle
import shutil
import struct

import pytest
import yaml
from typer.testing import CliRunner

from modelopt_spec import cli
from modelopt_spec.checkpoints.engines import ENGINES
from modelopt_spec.checkpoints.safe_read import read_header
from modelopt_spec.errors import CheckpointError
from modelopt_spec.training.train import train
from tests.checkpoints.test_gguf import tokenizer_file
from tests.training.tiny_run import make_target, recipe_values, write_chats


def mtsp(*arguments):
    return CliRunner().invoke(cli.application(), [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A target, a vanilla and an rnn drafter, prompts."""
    root = tmp_path_factory.mktemp("cli")
    target = make_target(root / "target")
    values = recipe_values(target, write_chats(root / "chats.jsonl", 8), root / "vanilla", max_steps=2)
    values["drafter"]["backbone"]["intermediate_size"] = 64
    for head in ("vanilla", "rnn"):
        values["drafter"]["head"] = {"type": head, "rank": 8}
        values["training"]["output_dir"] = str(root / head)
        (root / f"{head}.yaml").write_text(yaml.safe_dump(values))
        train(root / f"{head}.yaml", quiet=True)
    for name, text in (("prompts", "Say"), ("calibration", "Tell")):
        lines = [json.dumps({"prompt": f"{text} the lazy dog {i}."}) for i in range(3)]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(scope="module")
def exported(run):
    """The vanilla drafter as a published directory without a card, not to be changed."""
    out = run / "published"
    assert mtsp("export", run / "vanilla" / "drafter", out, "-q").exit_code == 0
    (out / "drafter_card.json").unlink()
    return out


def test_export_check_import_export(run, tmp_path):
    out = tmp_path / "out"
    result = mtsp(
        "export", run / "vanilla" / "drafter", out, "--engine", "vllm", "--engine", "sglang", "--json", "-", "-q"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["engines"] == ["vllm", "sglang"]
    assert set(report["launch"]) == {"vllm", "sglang"}
    checked = mtsp("check", out, "--json", tmp_path / "check.json", "-q")
    assert checked.exit_code == 0, checked.output
    facts = json.loads((tmp_path / "check.json").read_text())["facts"]
    assert {"taps", "block", "weights"} <= {fact["name"] for fact in facts}
    result = mtsp("import", out, tmp_path / "imported", "--target", run / "target", "--json", "-", "-q")
    assert result.exit_code == 0, result.output
    account = json.loads(result.stdout)
    assert account["layout"] == "deepspec"
    assert {entry["fate"] for entry in account["keys"]} <= {"used", "renamed", "ignored", "default"}
    assert mtsp("export", tmp_path / "imported", tmp_path / "again", "-q").exit_code == 0
    first, second = ((d / "model.safetensors").read_bytes() for d in (out, tmp_path / "again"))
    assert first == second


def test_check_fails_with_status_one(run, tmp_path):
    out = tmp_path / "out"
    assert mtsp("export", run / "vanilla" / "drafter", out, "-q").exit_code == 0
    config = json.loads((out / "config.json").read_text())
    config["target_layer_ids"] = [1, 3]
    (out / "config.json").write_text(json.dumps(config))
    for extra in ((), ("--static",), ("--engine", "vllm")):
        result = mtsp("check", out, *extra, "--json", "-", "-q")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["disagreements"] == ["taps"]


def test_export_refuses_before_writing(run, tmp_path):
    result = mtsp("export", run / "rnn" / "drafter", tmp_path / "out", "--engine", "vllm", "-q")
    assert result.exit_code != 0
    assert not (tmp_path / "out").exists()


def test_export_writes_gguf(run, tmp_path):
    pytest.importorskip("gguf")
    vocabulary = json.loads((run / "target" / "config.json").read_text())["vocab_size"]
    target = tokenizer_file(tmp_path / "target.gguf", vocabulary)
    result = mtsp("export", run / "vanilla" / "drafter", tmp_path / "out", "--gguf", target, "--json", "-", "-q")
    assert result.exit_code == 0, result.output
    assert "draft.gguf" in json.loads(result.stdout)["files"]
    assert (tmp_path / "out" / "draft.gguf").read_bytes()[:4] == b"GGUF"


class Bomb:
    """A pickle that leaves a file behind when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def traversal(source):
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    names = read_header(source / "model-1.safetensors")
    index = dict.fromkeys(names, "../outside.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def truncated(source):
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def huge_header(source):
    (source / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")


def repeated_key(source):
    text = (source / "config.json").read_text()
    (source / "config.json").write_text(text.replace("{", '{"block_size": 3, ', 1))


def a_pickle(source):
    (source / "model.safetensors").unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(source / "executed")))


def a_renamed_pickle(source):
    (source / "model.safetensors").write_bytes(pickle.dumps(Bomb(source / "executed")))


HOSTILE = {
    traversal: "same directory",
    truncated: "truncated or damaged",
    huge_header: "header claims",
    repeated_key: "'block_size' stands there twice",
    a_pickle: "are pickles",
    a_renamed_pickle: "renamed pickle",
}


@pytest.mark.parametrize("harm", HOSTILE)
def test_hostile_directories_are_refused_and_nothing_is_touched(run, exported, tmp_path, harm):
    shutil.copytree(exported, tmp_path / "source")
    harm(tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for command in (
        ("import", tmp_path / "source", out, "--target", run / "target", "--overwrite"),
        ("check", tmp_path / "source", "--target", run / "target"),
    ):
        result = mtsp(*command, "-q")
        assert result.exit_code != 0
        assert isinstance(result.exception, CheckpointError)
        assert HOSTILE[harm] in str(result.exception)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert (out / "mine").read_text() == "x"


def test_contradictions_may_be_allowed(run, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 5
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    arguments = ["import", tmp_path / "source", tmp_path / "out", "--target", run / "target", "--json", "-", "-q"]
    assert "contradicts itself" in str(mtsp(*arguments).exception)
    result = mtsp(*arguments, "--allow-contradictions")
    assert result.exit_code == 0, result.output
    assert "mask_token_id" in json.loads(result.stdout)["overruled"][0]
    written = json.loads((tmp_path / "out" / "drafter.json").read_text())["config"]
    assert written["mask_token_id"] == config["mask_token_id"]


def test_engines():
    result = mtsp("engines", "--json", "-", "-q")
    assert result.exit_code == 0
    table = json.loads(result.stdout)
    assert [engine["name"] for engine in table["engines"]] == list(ENGINES)
    assert "DSpark rnn" in mtsp("engines").stdout


@pytest.mark.parametrize("kind", ["fp8", "nvfp4", "int8"])
def test_quantize(run, tmp_path, kind):
    out = tmp_path / "out"
    arguments = ["--format", kind, "--prompts", run / "prompts.jsonl", "--calibration", run / "calibration.jsonl"]
    arguments += ["--max-new-tokens", "12", "--limit", "2", "--json", "-", "-q"]
    result = mtsp("quantize", run / "vanilla" / "drafter", out, *arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    for when in ("before", "after"):
        assert 1 <= report[when]["tau"] <= 5
        assert report[when]["rounds"] > 0
    assert report["calibration"] == {"format": kind, "prompts": 2, "same_prompts": False, "max_new_tokens": 12}
    assert report["bytes"]["after"] < report["bytes"]["before"] + 20_000
    card = json.loads((out / "drafter_card.json").read_text())["quantization"]
    assert card["before"] == report["before"]
    assert card["after"] == report["after"]
    assert card["layers"] == [
        f"layers.0.{p}" for p in ("self_attn.o_proj", *(f"mlp.{m}_proj" for m in ("gate", "up", "down")))
    ]
    assert mtsp("check", out, "-q").exit_code == 0


def test_distill(run, tmp_path):
    result = mtsp("distill", run / "rnn" / "drafter", tmp_path / "vanilla", "--steps", 3, "--json", "-", "-q")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 3
    exported = mtsp("export", tmp_path / "vanilla" / "drafter", tmp_path / "out", "--engine", "vllm", "-q")
    assert exported.exit_code == 0, exported.output
