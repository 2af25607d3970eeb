"""Single rows of packed weights are those of the weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gristmill.kernel_registry.scheme import ALL_WEIGHT_SCHEMES
from gristmill.quant import QuantTensor, pack, quantize
from gristmill.quant.packed import row_reader
from gristmill.quant.tensor import same_bits
from tests.quant.oracle import act_order, weight

INDEX = torch.tensor([0, 1, 15, 16, 17, 36, 36, 5])


@pytest.mark.parametrize("name", ALL_WEIGHT_SCHEMES)
@pytest.mark.parametrize("k", [128, 384])
def test_rows_are_the_weights(name: str, k: int) -> None:
    dense = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    w = weight(37, k)
    q = QuantTensor.from_dense(w.to(dense[name])) if name in dense else quantize(w, name)
    read, packed = row_reader("cpu_rows16_v1"), pack(q, "cpu_rows16_v1")
    assert read is not None
    rows = read(packed, INDEX)
    assert same_bits(rows, q.dense()[INDEX] if name in dense else q.dequantize()[INDEX])
    assert read(packed, INDEX[:0]).shape == (0, k)
    assert not torch.equal(read(packed, INDEX + (INDEX == 5)), rows)  # planted fault: one row is another


def test_what_is_not_read() -> None:
    assert row_reader("plain_v1") is None
    q = quantize(weight(16, 256), "int4_g128")
    read, packed = (
        row_reader("cpu_rows16_v1"),
        pack(replace(q, g_idx=act_order("int4_g128", 256)), "cpu_rows16_v1"),
    )
    assert read is not None
    with pytest.raises(ValueError, match="columns in order"):
        read(packed, INDEX[:1])
