"""The gated activation behind a matrix product, as one launch on a GPU, against torch in float32."""

from __future__ import annotations

import pytest
import torch

from gristmill.kernels.linear._epilogue import finish, finish_in_torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 28672), (7, 2 * 257), (3, 5, 64)])
def test_gating_is_that_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    z = (torch.randn(shape, generator=generator, device="cuda") * 8).to(dtype)
    actual, expected = (
        torch.full((*shape[:-1], shape[-1] // 2), float("nan"), dtype=dtype, device="cuda") for _ in range(2)
    )
    finish(z, None, None, True, actual)
    finish_in_torch(z, None, None, True, expected)
    # At most one rounding apart; in float32, the difference of two exponential functions for arguments of up
    # to 40.
    allowed = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert (
        (actual.double() - expected.double()).abs()
        <= allowed * expected.abs().double() + torch.finfo(dtype).tiny
    ).all()
