"""int32 words of packed codes, as GPTQ, AWQ and compressed-tensors store them, to QuantTensor's bit streams.

A word is little-endian: code i of b bits occupies bits [i*b, (i+1)*b). Packed densely, words in a row are one stream.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.kernel_registry.scheme import cdiv
from gristmill.quant import numeric
from gristmill.quant.formats.contract import Place, new_codes


def stream(words: Tensor, bits: int, count: int, place: Place = new_codes) -> Tensor:
    """Dense words int32 [..., W] -> the first `count` codes as a bit stream, uint8 [..., ceil(count * bits / 8)].

    The same memory where the words are contiguous and the codes fill them; where not, codes that fill them go to their `place`.
    Unused high bits of the last byte become 0.
    """
    used = cdiv(count * bits, 8)
    if not words.is_contiguous() and used * 8 == count * bits == words.shape[-1] * 32:
        octets = place((*words.shape[:-1], used))
        octets.view(torch.int32).copy_(words)
        return octets
    # contiguous() does not promise regular strides for dimensions of 1, reshape() of what is contiguous does
    octets = words.contiguous().reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    spare = used * 8 - count * bits
    if not spare:
        return octets[..., :used].contiguous()
    octets = octets[..., :used].clone(memory_format=torch.contiguous_format)
    octets[..., -1] &= 0xFF >> spare
    return octets


def codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Dense words int32 [..., W] -> the first `count` codes, one per byte, uint8 [..., count]."""
    return numeric.unpack_bits(stream(words, bits, count), bits, count)


def padded_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Words int32 [..., W] of 32 // bits codes each, the rest padding -> uint8 [..., count]."""
    shifts = torch.arange(32 // bits, device=words.device) * bits
    lanes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return lanes.to(torch.uint8).flatten(-2)[..., :count].contiguous()


def to_words(octets: Tensor, width: int) -> Tensor:
    """A bit stream uint8 [..., B] -> int32 [..., width], padded with zeros, as writers store it."""
    padded = torch.nn.functional.pad(octets, (0, 4 * width - octets.shape[-1]))
    return padded.clone(memory_format=torch.contiguous_format).view(torch.int32)
