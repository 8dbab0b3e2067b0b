"""Sampled generation has the target's own distribution: by enumeration to 1e-12, and by chi-square on more tokens."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.sampling import Sampling
from modelopt_spec.scheduling.cost import CostTable
from modelopt_spec.scheduling.policies import PrefixScheduler, StaticThreshold
from tests.decoding.enumeration import enumerate_outputs, target_outputs
from tests.decoding.oracle import propose
from tests.decoding.tiny import HEADS, LAYOUTS, add_drafter, tiny_target

SAMPLINGS = [Sampling(0.7), Sampling(1.3, 3), Sampling(1.0, 0, 0.8), Sampling(2.0, 3, 0.9)]
PROMPT = torch.tensor([[1, 2, 0]])


def handful(head: str, layout: str = "anchor_first", vocab: int = 4, block_size: int = 3, scale: float = 0.2):
    """A target and a drafter of a handful of tokens, in float64, with distributions that are neither flat nor sharp."""
    model = tiny_target("llama", seed=4, dtype=torch.float64, vocab_size=vocab, num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return add_drafter(model, head, layout, seed=7, block_size=block_size, backbone={"num_layers": 1})


def outputs_of(model, count: int, sampling: Sampling, scheduler=None, eos: int | None = None):
    """Exact distribution over generate's outputs."""

    def run(rows, random):
        return generate(
            model,
            PROMPT.expand(rows, -1),
            max_new_tokens=count,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eos_token_id=eos,
            random=random,
            scheduler=scheduler() if scheduler else None,
            return_rounds=False,
        ).outputs

    return enumerate_outputs(run)


def assert_equal(got: dict, want: dict) -> None:
    for output in {*got, *want}:
        assert got.get(output, 0.0) == pytest.approx(want.get(output, 0.0), abs=1e-12, rel=0)
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_enumeration(head: str, sampling: Sampling):
    layout = LAYOUTS[SAMPLINGS.index(sampling) % 2]
    drafts = 2
    block = drafts if layout == "anchor_first" and head != "gru" else drafts + 1
    model = handful(head, layout, vocab=3, block_size=block)
    assert model.drafter.num_draft_tokens == drafts
    count = 5 if (head, sampling) == ("rnn", SAMPLINGS[3]) else 4
    got = outputs_of(model, count, sampling)
    assert_equal(got, target_outputs(model, PROMPT, count, sampling))
    assert len(got) > 20


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_enumeration_with_an_end_of_text(head: str):
    model = handful(head, vocab=3, block_size=2)
    assert_equal(outputs_of(model, 4, Sampling(1.0), eos=2), target_outputs(model, PROMPT, 4, Sampling(1.0), eos=2))


def test_enumeration_with_an_adversarial_draft():
    """A draft that is nearly sure of the target's least likely tokens costs rounds, not exactness."""
    model = handful("vanilla", vocab=3, block_size=2)
    with torch.no_grad():
        model.drafter.norm.weight.neg_()
        model.drafter.norm.weight.mul_(8)
    assert_equal(outputs_of(model, 4, Sampling(1.0)), target_outputs(model, PROMPT, 4, Sampling(1.0)))


class PerRow:
    """A scheduler of its own for each row: the rows here are alternative courses of one request."""

    speculates = True

    def __init__(self, make, gamma: int) -> None:
        self.make, self.gamma, self.of = make, gamma, {}
        self.seen: set[int] = set()

    def lengths(self, confidence_logits, *, request_ids, capacity, context):
        chosen = []
        for index, row in enumerate(request_ids):
            scheduler = self.of.setdefault(row, self.make())
            one = scheduler.lengths(
                confidence_logits[index : index + 1],
                request_ids=[row],
                capacity=capacity[index : index + 1],
                context=context,
            )
            chosen.append(int(one[0]))
        self.seen.update(chosen)
        return torch.tensor(chosen)

    def finish(self, request_ids):
        for row in request_ids:
            self.of[row].finish([row])


COST = CostTable((1, 2, 3), (10.0, 8.0, 5.0))
SCHEDULERS = {
    "threshold": lambda: StaticThreshold(2, 0.3),
    "early_stop": lambda: PrefixScheduler(COST, 2, method="early_stop"),
    "global_stale": lambda: PrefixScheduler(COST, 2, delay=1),
    "stale_allocation": lambda: PrefixScheduler(COST, 2, delay=1, allocation="stale"),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_enumeration_with_a_scheduler(head: str, name: str):
    model = handful(head, vocab=3, block_size=2)
    schedulers = []

    def scheduler():
        schedulers.append(PerRow(SCHEDULERS[name], 2))
        return schedulers[-1]

    got = outputs_of(model, 4, Sampling(1.0), scheduler)
    assert_equal(got, target_outputs(model, PROMPT, 4, Sampling(1.0)))
    assert len(set().union(*(s.seen for s in schedulers))) > 1


def test_enumeration_notices_a_scheduler_that_looks_ahead():
    """Lengths that depend on the token they are about change the distribution: the proof above can fail."""

    class LooksAhead:
        def lengths(self, confidence_logits, *, request_ids, capacity, context):
            later = confidence_logits[:, 1] > cut
            return torch.where(later, capacity, 0)

        def finish(self, request_ids):
            pass

    model = handful("vanilla", vocab=3, block_size=2)
    confidences = [
        value
        for record in generate(model, PROMPT.expand(64, -1), max_new_tokens=4, temperature=1.0, top_k=0, seed=0).rounds
        if record.confidence_logits
        for value in record.confidence_logits[1:2]
    ]
    cut = sorted(confidences)[len(confidences) // 2]
    got = outputs_of(model, 4, Sampling(1.0), lambda: PerRow(LooksAhead, 2))
    want = target_outputs(model, PROMPT, 4, Sampling(1.0))
    assert sum(got.values()) == pytest.approx(1.0, abs=1e-12)
    assert max(abs(got.get(output, 0.0) - chance) for output, chance in want.items()) > 1e-4


@pytest.mark.parametrize("head", ["none", "gated", "gru"])
def test_chi_square_on_a_larger_vocabulary(head: str):
    """Three sampled tokens of 3,000 outputs against the target's exact distribution, pooled into 40 cells."""
    model = handful(head, vocab=23, block_size=4, scale=0.15).float()
    sampling = Sampling(0.9, 12, 0.95)
    want = target_outputs(model, PROMPT, 3, sampling)
    outputs = []
    for seed in range(6):
        result = generate(
            model,
            PROMPT.expand(500, -1),
            max_new_tokens=3,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=seed,
        )
        outputs += result.outputs
        assert any(record.accepted for record in result.rounds)
    assert set(outputs) <= set(want)
    # cells of about equal probability, outputs in a fixed order
    edges, cells, filled = 40, {}, 0.0
    for output, chance in sorted(want.items()):
        cells[output] = min(int(filled * edges), edges - 1)
        filled += chance
    expected, seen = torch.zeros(edges, dtype=torch.float64), torch.zeros(edges, dtype=torch.float64)
    for output, chance in want.items():
        expected[cells[output]] += chance * len(outputs)
    for output in outputs:
        seen[cells[output]] += 1
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, edges - 1) > 1e-4


def test_seeds_reproduce_and_rows_do_not_depend_on_their_batch():
    model = handful("rnn", vocab=23, block_size=4, scale=0.1)
    settings = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0, "top_k": 0}
    ids = torch.randint(23, (4, 6), generator=torch.Generator().manual_seed(0))
    together = generate(model, ids, seed=5, **settings).outputs
    assert together == generate(model, ids, seed=5, **settings).outputs
    assert together[0] == generate(model, ids[:1], seed=5, **settings).outputs[0]
    assert together != generate(model, ids, seed=6, **settings).outputs
    torch.manual_seed(1)
    first = generate(model, ids, **settings).outputs
    torch.manual_seed(1)
    assert first == generate(model, ids, **settings).outputs


def test_a_perfect_draft_is_always_accepted():
    """Where q equals p every draft token stands, sampled too."""
    model = tiny_target("llama")
    truth = model.generate(PROMPT, max_new_tokens=19, do_sample=False).tolist()
    propose(add_drafter(model), truth * 8)
    result = generate(model, PROMPT.expand(8, -1), max_new_tokens=19, do_sample=True, temperature=1.0, top_k=1)
    assert [list(output) for output in result.outputs] == [truth[0][3:]] * 8
    assert {record.committed for record in result.rounds} == {6}
