"""int32 words of packed codes, as GPTQ, AWQ and compressed-tensors store them, to QuantTensor's bit streams.

A word is little-endian: code i of b bits occupies bits [i*b, (i+1)*b). Packed densely, words in a row are one stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.quant import numeric


def stream(words: Tensor, bits: int, count: int) -> Tensor:
    """Dense words int32 [..., W] -> the first `count` codes as a bit stream, uint8 [..., ceil(count * bits / 8)].

    Unused high bits of the last byte become 0.
    """
    used = -(-count * bits // 8)
    # a clone has regular strides, which contiguous() does not promise for dimensions of 1
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :used].contiguous()
    spare = used * 8 - count * bits
    if spare:
        octets[..., -1] &= 0xFF >> spare
    return octets


def codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Dense words int32 [..., W] -> the first `count` codes, one a byte, uint8 [..., count]."""
    return numeric.unpack_bits(stream(words, bits, count), bits, count)


def padded_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Words int32 [..., W] of 32 // bits codes each, the rest padding -> uint8 [..., count]."""
    shifts = torch.arange(32 // bits, device=words.device) * bits
    lanes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return lanes.to(torch.uint8).flatten(-2)[..., :count].contiguous()


def to_words(octets: Tensor, width: int) -> Tensor:
    """A bit stream uint8 [..., B] -> int32 [..., width], zeros behind it: what writers store."""
    padded = torch.nn.functional.pad(octets, (0, 4 * width - octets.shape[-1]))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)
