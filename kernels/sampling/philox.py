"""Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) in plain torch integers.

The stream of a request: key = its 64-bit seed (low word first), counter = (output index low, output index high, token id,
0), all 32-bit words. It depends on nothing else: not on the batch, not on the kernel, not on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    Word = TypeVar("Word", Tensor, int)

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Word, Word, Word, Word]:
    """Four 32-bit words of a 4-word counter and a 2-word key, each an int64 tensor (or int) with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2^64; the shift copies the sign, the mask takes the copies off.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def token_uniforms(seed: Tensor, index: Tensor, vocabulary: int) -> Tensor:
    """float64 [B, vocabulary] uniforms in (0, 1) of requests with int64 seed [B] at int64 output index [B].

    The top 52 of 64 bits, centred in their cell: odd multiples of 2^-53, symmetric about 1/2, so that both tails of a
    logarithm are as fine as float64 allows.
    """
    import torch

    token = torch.arange(vocabulary, device=seed.device)[None, :]
    seed, index = seed[:, None], index[:, None]
    words = philox4x32(
        (index & _LOW, (index >> 32) & _LOW, token, torch.zeros_like(token)),
        (seed & _LOW, (seed >> 32) & _LOW),
    )
    bits = (words[0] << 20) | (words[1] >> 12)
    return (bits.double() + 0.5) * 2.0**-52
