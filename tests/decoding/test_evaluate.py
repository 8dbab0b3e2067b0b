"""Evaluation from prompt files to the report, its control, its comparison and its figures."""

from __future__ import annotations

import json

import pytest
import torch
from rich.console import Console

from modelopt_spec.decoding.answer import answer
from modelopt_spec.decoding.compare import compare_checkpoints, compare_reports
from modelopt_spec.decoding.control import shuffled_features
from modelopt_spec.decoding.evaluate import evaluate
from modelopt_spec.decoding.prompts import read_prompt_files
from modelopt_spec.decoding.rounds import read_rounds
from modelopt_spec.errors import ConfigError, DataError
from modelopt_spec.reports.evaluation import draw_evaluation, print_evaluation
from modelopt_spec.scheduling.policies import FixedLength
from modelopt_spec.scheduling.rounds import read_rounds as read_table
from tests.decoding.oracle import ScriptedDrafter
from tests.decoding.texts import tiny_tokenizer
from tests.decoding.tiny import add_drafter, rig_head, tiny_target

TOKENIZER = tiny_tokenizer()
VOCAB = len(TOKENIZER) + 5


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    """Two files of seven prompts with nine turns."""
    folder = tmp_path_factory.mktemp("prompts")
    first = [{"turns": ["What is a stop?", "And the other?"]}, {"turns": ["Say it."]}, {"prompt": "Go on."}]
    second = [
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]},
        {
            "conversations": [
                {"from": "human", "value": "One?"},
                {"from": "gpt", "value": "an answer of the file that is never used"},
                {"from": "human", "value": "Two?"},
            ]
        },
        {"text": "the stop the "},
        {"turns": ["Why the stop?"]},
    ]
    return [write(folder / "alpha.jsonl", first), write(folder / "beta.jsonl", second)]


class GuessingDrafter(ScriptedDrafter):
    """Proposes what the target says of its own features: right while those are the right ones."""

    def decode(self, cache, input_ids):
        self.anchors = input_ids[:, 0]
        return super(ScriptedDrafter, self).decode(cache, input_ids)

    def extend(self, cache, taps, counts=None):
        self.last = taps[:, -1] if counts is None else taps[torch.arange(len(taps)), counts - 1]
        super(ScriptedDrafter, self).extend(cache, taps, counts)

    def base_logits(self, hidden):
        """The model runs on from the anchor with its last features as a bigram would: a table learnt below."""
        logits = torch.zeros(*hidden.shape[:2], self.config.vocab_size)
        for row, (anchor, features) in enumerate(zip(self.anchors.tolist(), self.last, strict=True)):
            key = (anchor, round(float(features.sum()), 2))
            for slot, token in enumerate(self.table.get(key, [0] * hidden.shape[1])[: hidden.shape[1]]):
                logits[row, slot, token] = 1e5
        return logits


@pytest.fixture(scope="module")
def model(files):
    """A target whose drafter has learnt by heart what follows which features in these prompts."""
    torch.set_num_threads(1)
    model = add_drafter(tiny_target(vocab_size=VOCAB))
    drafter, target = model.drafter, model.drafter.target
    report = evaluate(model, TOKENIZER, files, max_new_tokens=24, baseline=False, control=False, probabilities=False)
    assert report["results"][0]["pooled"]["tau"] < 1.5
    from modelopt_spec.data.chat import ChatRenderer
    from modelopt_spec.decoding.measure import MeasureSettings, measure, numbered
    from modelopt_spec.decoding.sampling import GREEDY

    ends = (TOKENIZER.eos_token_id,)
    settings = MeasureSettings(5, 24, GREEDY, 0, 1, eos_token_ids=ends, probabilities=False)
    dialogues = numbered(read_prompt_files(files))
    table: dict = {}
    for item in measure(model, ChatRenderer(TOKENIZER), dialogues, settings).answers:
        ids = [*item.prompt_ids, *item.tokens]
        taps = target.features(torch.tensor([ids]), drafter.config.target_layer_ids).taps[0]
        for position in range(len(item.prompt_ids), len(ids)):
            key = (ids[position], round(float(taps[position - 1].sum()), 2))
            table.setdefault(key, ids[position + 1 : position + 6])
    drafter.__class__ = GuessingDrafter
    drafter.table = table
    return model


def test_report(model, files, tmp_path):
    out, rounds = tmp_path / "report.json", tmp_path / "rounds.jsonl"
    report = evaluate(model, TOKENIZER, files, max_new_tokens=24, out=out, rounds_out=rounds, figure=tmp_path / "f.png")
    assert json.loads(out.read_text()) == json.loads(json.dumps(report))
    assert (tmp_path / "f.png").stat().st_size > 10000
    result = report["results"][0]
    pooled, parts = result["pooled"], result["files"]
    assert set(parts) == {"alpha", "beta"}
    assert pooled["prompts"] == 7
    assert pooled["answers"] == 9
    for key in ("rounds", "answers", "new_tokens", "accepted_tokens"):
        assert pooled[key] == sum(part[key] for part in parts.values())
    weights = [part["rounds"] for part in parts.values()]
    mean = sum(part["tau"] * weight for part, weight in zip(parts.values(), weights, strict=True)) / sum(weights)
    assert pooled["tau"] == pytest.approx(mean)
    assert pooled["tau"] > 2
    assert sum(row["rounds"] for row in result["per_prompt"]) == pooled["rounds"]
    assert {row["file"] for row in result["per_prompt"]} == {"alpha", "beta"}
    assert pooled["tau_interval"][0] <= pooled["tau"] <= pooled["tau_interval"][1]
    assert pooled["tokens_per_second"] > 0
    assert len(pooled["accept_prob"]) == 5
    # what makes a result comparable
    assert report["dtype"] == "float32"
    assert report["num_draft_tokens"] == 5
    assert {"torch", "transformers", "modelopt_spec"} <= set(report["versions"])
    assert [file["first"] for file in report["prompts"]["files"]] == [0, 3]
    # the checks
    assert report["control"]["falls"]
    assert report["control"]["tau"] < report["control"]["tau_same_prompts"]
    assert report["baseline"]["equal_outputs"] == 1.0
    assert report["baseline"]["speedup"] > 0
    # rounds on disk are the rounds of the report
    header, records = read_rounds(rounds)
    assert header["gamma"] == 5
    assert header["drafter_fingerprint"] == report["drafter"]["fingerprint"]
    assert len(records) == pooled["rounds"]
    keys = [(record.prompt, record.round) for record in records]
    assert len(set(keys)) == len(keys)
    assert len(read_table(rounds)) == len(records)


def test_printing(model, files):
    report = evaluate(model, TOKENIZER, files, max_new_tokens=6, temperatures=(0.0, 0.8), seed=3, limit=2)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_evaluation(report, console)
    text = console.export_text()
    assert "temperature 0.8, 5 draft tokens, float32" in text
    assert "control: tau" in text
    assert "plain decoding" in text
    assert [result["temperature"] for result in report["results"]] == [0.0, 0.8]


def test_results_do_not_depend_on_the_batch_or_the_run(model, files):
    settings = {"max_new_tokens": 12, "baseline": False, "control": False, "seed": 5}
    for temperature in (0.0, 0.9):
        one = evaluate(model, TOKENIZER, files, temperatures=(temperature,), **settings)
        again = evaluate(model, TOKENIZER, files, temperatures=(temperature,), **settings)
        assert one["results"][0]["per_prompt"] == again["results"][0]["per_prompt"]
    greedy = evaluate(model, TOKENIZER, files, **settings)["results"][0]
    batched = evaluate(model, TOKENIZER, files, batch_size=3, **settings)["results"][0]
    for key in ("tau", "rounds", "committed_histogram", "conditional_acceptance"):
        assert batched["pooled"][key] == greedy["pooled"][key]


def test_rounds_of_several_temperatures_go_to_files_of_their_own(model, files, tmp_path):
    settings = {"max_new_tokens": 6, "baseline": False, "control": False, "limit": 1}
    evaluate(model, TOKENIZER, files, temperatures=(0.0, 0.7), rounds_out=tmp_path / "r.jsonl", **settings)
    found = {path.name: read_rounds(path)[0]["temperature"] for path in tmp_path.iterdir()}
    assert found == {"r.t0.jsonl": 0.0, "r.t0.7.jsonl": 0.7}


def test_a_rigged_head_shows(model, files):
    """The head is really applied: a bias that forces wrong tokens brings tau down to 1, with a warning."""
    settings = {"max_new_tokens": 16, "baseline": False, "control": False, "limit": 2}
    before = evaluate(model, TOKENIZER, files, **settings)["results"][0]["pooled"]["tau"]
    rigged = add_drafter(tiny_target(vocab_size=VOCAB))
    rigged.drafter.__class__, rigged.drafter.table = GuessingDrafter, model.drafter.table
    said = {token for row in model.drafter.table.values() for token in row}
    rig_head(rigged, next(token for token in range(VOCAB) if token not in said))
    report = evaluate(rigged, TOKENIZER, files, **settings)
    assert before > 2
    assert report["results"][0]["pooled"]["tau"] == 1.0
    assert any("no draft token was accepted" in text for text in report["warnings"])


def test_control_says_when_features_do_not_matter(files):
    """A drafter that ignores the target's features is found out."""

    class Deaf(GuessingDrafter):
        def extend(self, cache, taps, counts=None):
            super().extend(cache, torch.zeros_like(taps), counts)

    deaf = add_drafter(tiny_target(vocab_size=VOCAB))
    deaf.drafter.__class__, deaf.drafter.table = Deaf, {}
    report = evaluate(deaf, TOKENIZER, files, max_new_tokens=8, baseline=False, limit=2)
    assert not report["control"]["falls"]
    assert any("taps do not reach the drafter" in text for text in report["warnings"])


def test_shuffling_is_undone(model):
    drafter = model.drafter
    with shuffled_features(drafter):
        assert "extend" in vars(drafter)
    assert "extend" not in vars(drafter)


def test_scheduler_and_fewer_draft_tokens(model, files):
    settings = {"max_new_tokens": 16, "baseline": False, "control": False, "limit": 2}
    short = evaluate(model, TOKENIZER, files, num_draft_tokens=2, **settings)
    assert short["num_draft_tokens"] == 2
    assert len(short["results"][0]["pooled"]["conditional_acceptance"]) == 2
    cut = evaluate(model, TOKENIZER, files, scheduler=FixedLength(5, 1), **settings)["results"][0]["pooled"]
    assert cut["conditional_rounds"][1:] == [0] * 4
    assert cut["tau"] <= 2


def test_comparison(model, files, tmp_path):
    worse = add_drafter(tiny_target(vocab_size=VOCAB), seed=9)
    settings = {"max_new_tokens": 12, "probabilities": False}
    result = compare_checkpoints(model, worse, TOKENIZER, files, names=("learnt", "random"), **settings)
    greedy = result["differences"][0]
    assert greedy["pooled"]["better"] == "a"
    assert greedy["pooled"]["difference"] == pytest.approx(greedy["pooled"]["tau_b"] - greedy["pooled"]["tau_a"])
    assert greedy["pooled"]["interval"][1] < 0
    assert set(greedy["files"]) == {"alpha", "beta"}
    same = compare_reports(result["a"], result["a"])
    assert same["differences"][0]["pooled"]["better"] is None
    assert same["differences"][0]["pooled"]["difference"] == 0
    assert draw_evaluation(result, tmp_path / "compare.png").stat().st_size > 10000
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_evaluation(result, console)
    assert "random against learnt" in console.export_text()
    other = {**result["b"], "prompts": {**result["b"]["prompts"], "fingerprint": "x"}}
    with pytest.raises(DataError, match="other prompts"):
        compare_reports(result["a"], other)
    with pytest.raises(DataError, match="not an evaluation"):
        compare_reports(result["a"], {"kind": "else"})
    assert compare_reports(result["a"], {**result["b"], "max_new_tokens": 4})["warnings"]


def test_answers_of_one_token_need_no_round(model, files, tmp_path):
    """The only token is the target's: nothing was measured, which is neither NaN nor a fault of the taps."""
    out = tmp_path / "report.json"
    report = evaluate(model, TOKENIZER, files, max_new_tokens=1, baseline=False, out=out)
    assert json.loads(out.read_text(), parse_constant=pytest.fail) == json.loads(json.dumps(report))
    assert report["results"][0]["pooled"]["tau"] is None
    control = report["control"]
    assert (control["tau"], control["tau_same_prompts"], control["falls"]) == (None, None, None)
    assert [text.partition(":")[0] for text in report["warnings"]] == ["control", "temperature 0"]
    assert "needed no round" in report["warnings"][0]
    assert "no round was needed for 9 tokens in 9 answers" in report["warnings"][1]
    assert not any("taps" in text for text in report["warnings"])
    console = Console(record=True, width=200, file=open(tmp_path / "shown", "w"))  # noqa: SIM115
    print_evaluation(report, console)
    assert "control: no round to compare (7 prompts)" in console.export_text()
    assert answer(model, TOKENIZER, "the stop?", max_new_tokens=1)["tau"] is None


def test_answer(model):
    result = answer(model, TOKENIZER, "the stop?", max_new_tokens=8)
    assert result["new_tokens"] == len(result["token_ids"]) <= 8
    assert result["text"] == TOKENIZER.decode(result["token_ids"], skip_special_tokens=True)
    assert result["tokens_per_second"] > 0
    raw = answer(model, TOKENIZER, "the stop", raw=True, max_new_tokens=8, temperature=1.0, seed=1)
    assert (
        raw["token_ids"]
        == answer(model, TOKENIZER, "the stop", raw=True, max_new_tokens=8, temperature=1.0, seed=1)["token_ids"]
    )
    with pytest.raises(DataError, match="empty"):
        answer(model, TOKENIZER, "")


# ---- prompt files ---------------------------------------------------------------------------------------------------


def test_prompt_files(files):
    alpha, beta = read_prompt_files(files)
    assert [len(d.turns) for d in alpha.dialogues] == [2, 1, 1]
    assert [len(d.turns) for d in beta.dialogues] == [1, 2, 1, 1]
    assert all(m["role"] != "assistant" for d in beta.dialogues for m in d.messages)
    assert beta.dialogues[0].messages[0]["role"] == "system"
    assert read_prompt_files(files, limit=1)[0].sha256 != alpha.sha256
    assert read_prompt_files(files[0])[0].sha256 == alpha.sha256


def test_later_turns_hold_the_target_s_own_answers(files):
    from modelopt_spec.data.chat import ChatRenderer

    dialogue = read_prompt_files(files)[1].dialogues[1]
    ids = dialogue.prompt(ChatRenderer(TOKENIZER), 1, ["mine"])
    assert TOKENIZER.decode(ids) == "<|user|>One?<|end|><|assistant|>mine<|end|><|user|>Two?<|end|><|assistant|>"
    text = read_prompt_files(files)[1].dialogues[2]
    assert TOKENIZER.decode(text.prompt(ChatRenderer(TOKENIZER), 0, [])) == "the stop the "


def test_equal_stems_are_told_apart(files, tmp_path):
    (tmp_path / "x").mkdir()
    other = write(tmp_path / "x" / "alpha.jsonl", [{"prompt": "Hi."}])
    names = [file.name for file in read_prompt_files([files[0], other])]
    assert names[1] == "x/alpha"
    assert len(set(names)) == 2


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([{"turns": ["ok"]}, {"nothing": 1}], r"bad.jsonl:2: unknown_shape"),
        ([{"turns": []}], r"bad.jsonl:1: empty"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], r"bad.jsonl:1: role_order"),
        ([{"prompt": 5}], r"bad.jsonl:1: content: prompt is text or a list of messages, not int"),
        ([{"turns": [5]}], r"bad.jsonl:1: content: a turn is text, not int"),
        ([], "no prompt"),
    ],
)
def test_bad_prompts_are_named(rows: list, named: str, tmp_path):
    with pytest.raises(DataError, match=named):
        read_prompt_files(write(tmp_path / "bad.jsonl", rows))


def test_bad_settings_are_named(model, files):
    with pytest.raises(DataError, match="names no file"):
        evaluate(model, TOKENIZER, [])
    with pytest.raises(ConfigError, match="limit is 0"):
        evaluate(model, TOKENIZER, files, limit=0)
    with pytest.raises(ConfigError, match="temperatures is empty"):
        evaluate(model, TOKENIZER, files, temperatures=())
    with pytest.raises(ConfigError, match="batch_size is 0"):
        evaluate(model, TOKENIZER, files, batch_size=0)
    with pytest.raises(ConfigError, match="has no drafter"):
        evaluate(tiny_target(), TOKENIZER, files)
    with pytest.raises(ConfigError, match="tokenizer is 'None', a NoneType: pass the target's tokenizer"):
        evaluate(model, None, files)
    with pytest.raises(ConfigError, match="prompts is None: it must be a JSONL file"):
        evaluate(model, TOKENIZER, None)
    with pytest.raises(ConfigError, match=r"temperatures is 0\.5: it must be a list"):
        evaluate(model, TOKENIZER, files, temperatures=0.5)
    with pytest.raises(ConfigError, match="temperatures is nan"):
        evaluate(model, TOKENIZER, files, temperatures=(float("nan"),))
    with pytest.raises(ConfigError, match="seed is -1"):
        evaluate(model, TOKENIZER, files, seed=-1)
    with pytest.raises(ConfigError, match="max_new_tokens is 0"):
        evaluate(model, TOKENIZER, files, max_new_tokens=0)
