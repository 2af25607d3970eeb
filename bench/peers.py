"""Peers without a kernel here: libraries that do the same work and that no spec wraps, reported as gaps.

A library that a spec wraps is a candidate if it is installed, and otherwise a gap with the reason
(`gristmill.bench.problems.missing_peers`). The libraries listed here are always gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

from gristmill.autotune.place import Place
from gristmill.kernel_registry.op import Op
from gristmill.kernel_registry.registry import default_registry


@dataclass(frozen=True)
class Peer:
    """A distribution, the operations that it offers too, the vendors of its devices, and why no spec wraps it."""

    name: str
    package: str
    ops: tuple[str, ...]
    vendors: tuple[str, ...]
    why: str = ""


PEERS = (
    Peer("gemlite", "gemlite", ("linear",), ("nvidia", "amd")),
    Peer("torchao", "torchao", ("linear",), ("nvidia", "cpu")),
    Peer("humming", "humming-kernels", ("grouped_linear", "moe"), ("nvidia",)),
    Peer(
        "flashinfer",
        "flashinfer-python",
        (
            "fused_add_rms_norm",
            "rotary_embedding",
            "silu_and_mul",
            "sample",
            "reshape_and_cache",
            "varlen_attention",
            "moe",
        ),
        ("nvidia",),
    ),
    Peer(
        "onnxruntime",
        "onnxruntime",
        ("linear",),
        ("cpu",),
        "its MatMulNBits is fast only over constant weights that a session packs for itself, and cannot follow content rewritten in place",
    ),
    Peer("onnxruntime", "onnxruntime", ("fused_add_rms_norm", "rotary_embedding", "moe"), ("cpu",)),
)


def unwrapped(op: Op, here: Place) -> dict[str, str]:
    """Library -> why it has no time, for each library that offers `op` on such a device and has no kernel here."""
    wrapped = {kernel.provider for kernel in default_registry().kernels_of(op.name)}
    gaps = {}
    for peer in PEERS:
        if op.name in peer.ops and here.target.vendor in peer.vendors and peer.name not in wrapped:
            version = here.build.version(peer.package)
            state = "not installed" if version is None else f"{peer.package} {version} is installed"
            gaps[peer.name] = f"no kernel here, and {state}" + (f": {peer.why}" if peer.why else "")
    return gaps
