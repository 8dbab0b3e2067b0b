"""The tiled RMSNorm against the plain one: values, gradients, rotation, and when it is taken."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelopt_spec.drafter import norm
from modelopt_spec.drafter.norm import Angles, DraftNorm, plain_norm


def random_angles(shape: tuple[int, ...], dtype: torch.dtype, scaling: float = 1.0) -> Angles:
    half = torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype)
    angles = torch.cat([half, half], dim=-1)
    return angles.cos() * scaling, angles.sin() * scaling


def results(layer: DraftNorm, x: Tensor, angles: Angles | None, above: Tensor, plain: bool) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = plain_norm(x, layer.weight, layer.eps, angles) if plain else layer(x, angles)
    return [out.detach(), *torch.autograd.grad(out, (x, layer.weight), above)]


@settings(deadline=None, max_examples=60)
@given(
    leading=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    heads=st.integers(1, 4),
    width=st.sampled_from([2, 6, 16]),
    rotated=st.booleans(),
    strided=st.booleans(),
    eps=st.sampled_from([None, 1e-6, 1e-2]),
    tile=st.sampled_from([1, 48, 1 << 17]),
    seed=st.integers(0, 9),
)
def test_equals_the_plain_norm(leading, heads, width, rotated, strided, eps, tile, seed):
    torch.manual_seed(seed)
    shape = (*leading, heads, width)
    x, above = torch.randn(2, *shape, dtype=torch.float64)
    if strided:
        x, above = (part.transpose(0, -2).contiguous().transpose(0, -2) for part in (x, above))
    angles = random_angles((*leading, width), torch.float64, scaling=1.1) if rotated else None
    layer = DraftNorm(width, eps=eps).double()
    torch.nn.init.normal_(layer.weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "TILE", tile)
        fast = results(layer, x, angles, above, plain=False)
    for ours, reference in zip(fast, results(layer, x, angles, above, plain=True), strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=1e-10)


def test_float32_rounds_like_the_plain_norm():
    torch.manual_seed(0)
    x, above = torch.randn(2, 3, 700, 2, 64)
    angles, layer = random_angles((3, 700, 64), torch.float32), DraftNorm(64, eps=1e-6)
    exact = DraftNorm(64, eps=1e-6).double()
    doubles = (angles[0].double(), angles[1].double())
    wanted = results(exact, x.double(), doubles, above.double(), plain=True)
    for plain in (False, True):
        for ours, reference in zip(results(layer, x, angles, above, plain), wanted, strict=True):
            assert (ours - reference).abs().max() <= 1e-5 * max(1.0, reference.abs().max())


def test_angles_may_be_shared_by_rows():
    x = torch.randn(3, 5, 2, 8)
    angles = random_angles((5, 8), torch.float32)
    layer = DraftNorm(8, eps=1e-6)
    torch.testing.assert_close(layer(x, angles), plain_norm(x, layer.weight, 1e-6, angles))


@pytest.mark.parametrize("case", ["half", "no gradient", "autocast", "other weight type", "other angle type"])
def test_every_other_case_is_the_plain_norm(case, monkeypatch):
    """Kernels of accelerators and of half precision stay; decoding keeps its bits."""
    monkeypatch.setattr(norm._TiledNorm, "apply", lambda *args: pytest.fail("the tiled norm ran"))
    x, layer = torch.randn(2, 3, 8), DraftNorm(8, eps=1e-6)
    angles = random_angles((2, 8), torch.float32)
    if case == "half":
        x, layer, angles = x.bfloat16(), layer.bfloat16(), (angles[0].bfloat16(), angles[1].bfloat16())
    if case == "other weight type":
        x = x.double()
    if case == "other angle type":
        angles = (angles[0].double(), angles[1].double())
    with torch.set_grad_enabled(case != "no gradient"), torch.autocast("cpu", enabled=case == "autocast"):
        assert torch.equal(layer(x, angles), plain_norm(x, layer.weight, layer.eps, angles))


def test_a_compiler_sees_the_plain_steps(monkeypatch):
    monkeypatch.setattr(norm._TiledNorm, "apply", lambda *args: pytest.fail("the tiled norm ran"))
    layer, x = DraftNorm(8, eps=1e-6), torch.randn(2, 3, 8)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain_norm(x, layer.weight, 1e-6))


def test_another_width_is_refused_with_and_without_gradients():
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="normalized_shape"):
            DraftNorm(1)(torch.randn(3, 8))


def test_nothing_to_differentiate_makes_no_graph():
    layer = DraftNorm(8, eps=1e-6).requires_grad_(False)
    assert not layer(torch.randn(2, 8)).requires_grad
