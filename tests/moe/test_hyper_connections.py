"""Hyper-connections: goldens, the plain equations, transformers' own module, doubly stochastic mixing, precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

from modelopt_spec.config import HyperConnectionConfig
from modelopt_spec.drafter.hyper_connections import HyperConnection, StreamCollapse, sinkhorn
from modelopt_spec.drafter.hyper_connections_reference import (
    collapse_reference,
    connection_reference,
    merge_reference,
    sinkhorn_reference,
)
from tests.golden.module_cases import check_module_case, expected_names
from tests.golden.runner import DATA, check_file, load_case

SETTINGS = HyperConnectionConfig(streams=4, sinkhorn_iterations=20, eps=1e-6)
CASES = ("mhc_hyper_connection", "mhc_hyper_connection_coarse", "deepseek_v4_layer")


def _random(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Parameters that make every coefficient depend on the streams."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return module


@pytest.mark.parametrize("name", CASES)
def test_goldens(name: str) -> None:
    rows = check_file(DATA / f"{name}.json")
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("name", CASES)
def test_goldens_are_compared_completely(name: str) -> None:
    case, tensors = load_case(DATA / f"{name}.json")
    compared = {row[0].split(": ")[1] for row in check_module_case(case, tensors, "float32")}
    assert compared == expected_names(case, tensors)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 6), bound=st.floats(0.0, 1.0), seed=st.integers(0, 2**20), eps=st.sampled_from([1e-6, 1e-9]))
def test_sinkhorn_is_doubly_stochastic(n: int, bound: float, seed: int, eps: float) -> None:
    """20 iterations in float32 leave row and column sums within 1e-6 of 1, beside the eps that each divisor carries."""
    uniform = torch.rand(64, n, n, generator=torch.Generator().manual_seed(seed))
    matrix = sinkhorn(bound * (2 * uniform - 1), iterations=20, eps=eps)
    assert matrix.dtype == torch.float32 and bool((matrix > 0).all())
    assert (matrix.sum(-2) - 1).abs().max() <= 1e-6 + eps
    assert (matrix.sum(-1) - 1).abs().max() <= 1e-6 + eps


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 6), spread=st.floats(1.0, 30.0), iterations=st.integers(1, 20), seed=st.integers(0, 2**20))
def test_columns_never_amplify_for_any_logits(n: int, spread: float, iterations: int, seed: int) -> None:
    """Far-apart logits need more iterations for their rows; columns come last, so no stream outgrows the old ones."""
    logits = torch.randn(64, n, n, generator=torch.Generator().manual_seed(seed)) * spread
    matrix = sinkhorn(logits, iterations=iterations, eps=1e-6)
    assert bool((matrix > 0).all()) and matrix.sum(-2).max() <= 1 + 1e-6


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_sinkhorn_equals_reference(n: int, iterations: int) -> None:
    logits = torch.randn(5, n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    got = sinkhorn(logits, iterations=iterations, eps=1e-3)
    want = torch.stack([sinkhorn_reference(one, iterations, 1e-3) for one in logits])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_connection_equals_reference(n: int) -> None:
    config = HyperConnectionConfig(streams=n, sinkhorn_iterations=5, eps=1e-3)
    module = _random(HyperConnection(config, 6, 1e-6).double(), n)
    streams = torch.randn(2, 3, n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    output = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    collapsed, mixing = module(streams)
    merged = module.merge(streams, output, mixing)
    for place, (token, out) in enumerate(zip(streams.view(-1, n, 6), output.view(-1, 6), strict=True)):
        pre, post, comb = connection_reference(
            token, module.fn, module.base, module.scale, iterations=5, eps=1e-3, norm_eps=1e-6
        )
        torch.testing.assert_close(mixing.comb[place], comb, rtol=0, atol=1e-13)
        torch.testing.assert_close(collapsed.view(-1, 6)[place], pre @ token, rtol=0, atol=1e-13)
        torch.testing.assert_close(merged.view(-1, n, 6)[place], merge_reference(token, out, post, comb))
    head = _random(StreamCollapse(config, 6, 1e-6).double(), 3)
    for token, got in zip(streams.view(-1, n, 6), head(streams).view(-1, 6), strict=True):
        want = collapse_reference(token, head.hc_fn, head.hc_base, head.hc_scale, eps=1e-3, norm_eps=1e-6)
        torch.testing.assert_close(got, want)


def test_equals_transformers() -> None:
    """The same parameters in transformers' modules give the same float32 result."""
    theirs_config = DeepseekV4Config(hidden_size=16, hc_mult=4, num_hidden_layers=1)
    theirs, their_head = _random(DeepseekV4HyperConnection(theirs_config)), _random(DeepseekV4HyperHead(theirs_config))
    ours = HyperConnection(SETTINGS, 16, theirs_config.rms_norm_eps)
    head = StreamCollapse(SETTINGS, 16, theirs_config.rms_norm_eps)
    ours.load_state_dict(theirs.state_dict())
    head.load_state_dict(their_head.state_dict())
    streams = torch.randn(2, 7, 4, 16, generator=torch.Generator().manual_seed(4))
    post, comb, collapsed = theirs(streams)
    got, mixing = ours(streams)
    torch.testing.assert_close(got, collapsed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixing.post, post.flatten(0, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mixing.comb, comb.flatten(0, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head(streams), their_head(streams), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_mixing_is_doubly_stochastic_at_the_start_and_around_it(n: int) -> None:
    """Rows and columns sum to 1 within 1e-6 (and eps) in float32, with the 20 iterations that engines run."""
    module = HyperConnection(SETTINGS.replace(streams=n), 8, 1e-6)
    torch.manual_seed(0)
    with torch.no_grad():
        module.base[2 * n :] += 0.2 * (2 * torch.rand(n * n) - 1)
        module.scale.fill_(0.05)
    _, mixing = module(torch.randn(300, n, 8))
    assert mixing.comb.dtype == torch.float32 and float(mixing.comb.std()) > 0
    for axis in (-1, -2):
        assert (mixing.comb.sum(axis) - 1).abs().max() <= 1e-6 + SETTINGS.eps


@pytest.mark.parametrize("n", [1, 2, 4])
def test_starts_as_a_plain_residual(n: int) -> None:
    config = SETTINGS.replace(streams=n)
    module, head = HyperConnection(config, 8, 1e-6), StreamCollapse(config, 8, 1e-6)
    x, output = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    streams = x.unsqueeze(-2).expand(-1, -1, n, -1)
    collapsed, mixing = module(streams)
    merged = module.merge(streams, output, mixing)
    torch.testing.assert_close(collapsed, x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged, (x + output).unsqueeze(-2).expand_as(merged), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head(merged), x + output, rtol=1e-5, atol=1e-5)


def test_streams_part_after_the_first_update() -> None:
    """The start is symmetric in function but not in its gradient: one step makes the streams differ."""
    torch.manual_seed(0)
    module, head = HyperConnection(SETTINGS, 8, 1e-6), StreamCollapse(SETTINGS, 8, 1e-6)
    x = torch.randn(6, 8)

    def run() -> torch.Tensor:
        streams = x.unsqueeze(-2).expand(-1, 4, -1)
        for _ in range(2):
            collapsed, mixing = module(streams)
            streams = module.merge(streams, collapsed.tanh(), mixing)
        return streams

    before = run()
    assert (before - before[:, :1]).abs().max() < 1e-5
    (head(before) ** 2).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.05 * parameter.grad.sign()
    after = run()
    assert (after - after[:, :1]).abs().max() > 1e-3


def test_parameters_stay_float32_and_exact() -> None:
    module = _random(HyperConnection(SETTINGS, 8, 1e-6))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for cast in (lambda: module.to(torch.bfloat16), module.bfloat16, module.half, module.float):
        cast()
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, before[name])
    assert module.double().fn.dtype == torch.float64


def test_coefficients_are_float32_for_16_bit_streams_and_under_autocast() -> None:
    module = _random(HyperConnection(SETTINGS, 16, 1e-6)).bfloat16()
    streams = torch.randn(3, 5, 4, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        collapsed, mixing = module(streams)
        merged = module.merge(streams, collapsed, mixing)
    exact, exact_mixing = module(streams.float())
    assert collapsed.dtype == merged.dtype == torch.bfloat16
    assert mixing.comb.dtype == mixing.post.dtype == torch.float32
    torch.testing.assert_close(mixing.comb, exact_mixing.comb, rtol=0, atol=1e-6)
    torch.testing.assert_close(collapsed.float(), exact, rtol=1e-2, atol=1e-2)
    assert (mixing.comb.sum(-2) - 1).abs().max() < 3e-6
