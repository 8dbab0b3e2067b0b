"""One function makes the distribution for target and draft; it must be transformers' own."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from modelopt_spec.decoding.generate import generate
from modelopt_spec.decoding.randomness import RowRandom
from modelopt_spec.decoding.sampling import GREEDY, Sampling, probabilities
from modelopt_spec.errors import ConfigError
from tests.decoding.tiny import add_drafter, tiny_target


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What transformers' generate samples from."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 0.01])
def test_equals_transformers(temperature: float, top_k: int, top_p: float):
    torch.manual_seed(top_k)
    logits = torch.randn(6, 97) * 4
    sampling = Sampling(temperature, top_k, top_p)
    got, want = probabilities(logits, sampling), warped(logits, sampling)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(probabilities(logits.view(2, 3, 97), sampling).view(6, 97), got)


def test_ties_at_the_kth_logit_all_stay_as_in_transformers():
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 0.0, -1.0]])
    for top_p in (1.0, 0.95):
        sampling = Sampling(1.0, 2, top_p)
        assert torch.equal(probabilities(logits, sampling) > 0, warped(logits, sampling) > 0)


def test_forbidden_tokens_stay_forbidden():
    logits = torch.tensor([[0.0, float("-inf"), 1.0, float("-inf")]])
    got = probabilities(logits, Sampling(1.0, 3, 0.99))
    assert got[0, 1] == 0
    assert got[0, 3] == 0


@pytest.mark.parametrize(
    ("values", "named"),
    [((-1.0, 0, 1.0), "temperature"), ((1.0, -1, 1.0), "top_k"), ((1.0, 0, 0.0), "top_p"), ((1.0, 0, 1.1), "top_p")],
)
def test_bad_settings_are_named(values: tuple, named: str):
    with pytest.raises(ConfigError, match=named):
        Sampling(*values)


def test_greedy_has_no_distribution():
    with pytest.raises(ConfigError, match="argmax"):
        probabilities(torch.zeros(1, 3), GREEDY)


def test_rows_draw_the_same_numbers_whoever_runs_with_them():
    many, few = RowRandom(5, seed=3), RowRandom(5, seed=3)
    both = many.uniform([0, 1, 2, 3, 4], [4] * 5, 4)
    first, second = few.uniform([1, 3], [1, 3], 3), few.uniform([1, 3], [3, 1], 5)
    assert torch.equal(both[1], torch.cat([first[0, :1], second[0, :3]]))
    assert torch.equal(both[3], torch.cat([first[1], second[1, :1]]))
    assert torch.equal(first[0, 1:], torch.ones(2, dtype=torch.float64))
    assert len(set(both.flatten().tolist())) == both.numel()
    assert not torch.equal(both[0], RowRandom(5, seed=4).uniform([0], [4], 4)[0])


def test_unseeded_rows_follow_torch():
    torch.manual_seed(11)
    first = RowRandom(1).uniform([0], [3], 3)
    torch.manual_seed(11)
    assert torch.equal(first, RowRandom(1).uniform([0], [3], 3))
    generator = torch.Generator().manual_seed(11)
    again = RowRandom(1, generator=generator).uniform([0], [3], 3)
    assert torch.equal(again, RowRandom(1, generator=torch.Generator().manual_seed(11)).uniform([0], [3], 3))
    assert not torch.equal(again, RowRandom(1, generator=generator).uniform([0], [3], 3))
    with pytest.raises(ConfigError, match="both given"):
        RowRandom(1, 1, generator)


class Fixed(RowRandom):
    """Uniform numbers of a script."""

    def __init__(self, values: list[float]) -> None:
        self.values = torch.tensor(values, dtype=torch.float64)

    def uniform(self, rows, counts, width):
        return self.values.view(-1, 1).expand(-1, width)


def test_drawing_inverts_the_cumulative_weights_and_never_hits_zero_weights():
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0, 0.0]] * 5)
    drawn = Fixed([0.0, 0.2499, 0.25, 0.9, 1 - 2**-53]).categorical(weights, range(5))
    assert drawn.tolist() == [1, 1, 3, 3, 3]
    assert Fixed([0.999999]).categorical(torch.tensor([[2.0, 0.0, 1e-30, 0.0]]), [0]).item() in (0, 2)


def test_drawn_shares_match_the_weights():
    weights = torch.tensor([[0.1, 0.0, 0.6, 0.3]]).expand(4000, 4)
    drawn = RowRandom(4000, seed=0).categorical(weights, range(4000))
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert torch.allclose(shares, weights[0], atol=0.03)
    accepted = RowRandom(4000, seed=0).accept(torch.full((4000, 2), 0.3), range(4000), [2] * 4000)
    assert torch.allclose(accepted.float().mean(0), torch.tensor(0.3), atol=0.03)


@pytest.mark.parametrize(("name", "value"), [("temperature", float("nan")), ("top_p", 2.0), ("top_k", -1)])
def test_generate_refuses_what_cannot_be_meant_also_without_sampling(name: str, value: float):
    with pytest.raises(ConfigError, match=f"{name} is"):
        generate(add_drafter(tiny_target("llama")), torch.tensor([[5, 6]]), max_new_tokens=2, **{name: value})
