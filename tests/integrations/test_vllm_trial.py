"""What counts as a layer that vLLM's own method does not serve; without vLLM."""

from __future__ import annotations

import pytest
import torch

from gristmill.integrations.vllm.trial import NoMethodError, served


def missing_operator() -> None:
    torch.ops.gristmill_no_such_library.gemm()


def raises(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("No compressed-tensors compatible scheme was found."),
        NotImplementedError("Could not run '_C::gemm' with arguments from the 'CPU' backend"),
        ValueError("Failed to find a kernel that can implement the WNA16 linear layer. Reasons: ..."),
        ValueError("The input size is not aligned with the quantized weight shape."),
        RuntimeError("Quantization scheme is not supported for the current GPU. Min capability: 80."),
        ModuleNotFoundError("No module named 'conch'"),
    ],
    ids=lambda error: f"{type(error).__name__}: {str(error)[:20]}",
)
def test_refusals(error: Exception) -> None:
    with pytest.raises(NoMethodError) as raised:
        served(raises, error)
    assert str(raised.value) == f"{type(error).__name__}: {error}" and raised.value.__cause__ is error


def test_an_operator_that_is_not_in_the_build() -> None:
    with pytest.raises(NoMethodError, match="AttributeError: .*_OpNamespace"):
        served(missing_operator)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        AttributeError("'Layer' object has no attribute 'weight_scale'"),
        TypeError("create_weights() missing 1 required positional argument"),
        KeyError("scale"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_failures_are_raised_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        served(raises, error)
    assert raised.value is error


def test_what_is_served() -> None:
    assert served(lambda x, y: x + y, 1, 2) == 3
