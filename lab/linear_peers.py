"""onnxruntime and ggml as callables that multiply by a quantized weight, for `lab.linear_a8`. Each takes x float32 [M, K].

Both quantize x to int8: onnxruntime per block of the weight (accuracy_level 4), ggml per block of 32. Weights are given as codes and scales, so
that a peer multiplies by the same numbers as our kernels, or, in ggml's formats, by those that it says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], torch.Tensor]
"""A product, into an output that is reused."""

_BLOCK_BYTES = {"q4_0": 18, "q8_0": 34}
_GGML_TYPES = {"q4_0": 2, "q8_0": 8}


def onnxruntime_call(codes: torch.Tensor, scales: torch.Tensor, bits: int, x: torch.Tensor) -> Call:
    """MatMulNBits at accuracy_level 4. codes uint8 [N, K], one per byte, zero 2**(bits - 1); scales float32 [N, K / block]."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    (n, k), block = codes.shape, codes.shape[1] // scales.shape[1]
    octets = codes if bits == 8 else codes[:, 0::2] | (codes[:, 1::2] << 4)
    blob = octets.reshape(n, k // block, block * bits // 8).contiguous()
    node = helper.make_node(
        "MatMulNBits",
        ["x", "codes", "scales"],
        ["y"],
        domain="com.microsoft",
        K=k,
        N=n,
        bits=bits,
        block_size=block,
        accuracy_level=4,
    )
    weights = [
        helper.make_tensor("codes", TensorProto.UINT8, blob.shape, blob.numpy().tobytes(), raw=True),
        helper.make_tensor(
            "scales", TensorProto.FLOAT, scales.shape, scales.numpy().astype(np.float32).tobytes(), raw=True
        ),
    ]
    graph = helper.make_graph(
        [node],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [x.shape[0], k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [x.shape[0], n])],
        weights,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    out = torch.empty(x.shape[0], n)
    binding = session.io_binding()
    for bind, name, tensor in ((binding.bind_input, "x", x), (binding.bind_output, "y", out)):
        bind(name, "cpu", 0, np.float32, list(tensor.shape), tensor.data_ptr())

    def call() -> torch.Tensor:
        session.run_with_iobinding(binding)
        return out

    return call


def ggml_blocks(kind: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows of q4_0 or q8_0 blocks, uint8 [N, bytes], of codes uint8 [N, K] with zero 2**(bits - 1) and float16 scales [N, K / 32]."""
    blocks = codes.unflatten(-1, (-1, 32))
    if kind == "q4_0":
        octets = blocks[..., :16] | (blocks[..., 16:] << 4)
    else:
        octets = blocks ^ 0x80
    heads = scales.to(torch.float16).unsqueeze(-1).view(torch.uint8)
    return torch.cat([heads, octets], -1).flatten(-2).contiguous()


class _InitParams(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Ggml:
    """ggml's CPU backend, loaded from the shared libraries in a directory."""

    def __init__(self, directory: Path) -> None:
        self.base = ctypes.CDLL(str(directory / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(directory / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        self.base.ggml_version.restype = ctypes.c_char_p
        self.backend = self._pointer(self.cpu, "ggml_backend_cpu_init")
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, torch.get_num_threads())
        self.buffers = {"plain": self._pointer(self.base, "ggml_backend_cpu_buffer_type")}
        registry = self._pointer(self.cpu, "ggml_backend_cpu_reg")
        device = self._pointer(self.base, "ggml_backend_reg_dev_get", registry, ctypes.c_size_t(0))
        entry = ctypes.c_char_p(b"ggml_backend_dev_get_extra_bufts")
        find = self._pointer(self.base, "ggml_backend_reg_get_proc_address", registry, entry)
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(find.value or 0)(device)
        name = self.base.ggml_backend_buft_name
        name.restype, name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        index = 0
        while extra[index]:
            if b"REPACK" in name(extra[index]):
                self.buffers["repacked"] = ctypes.c_void_p(extra[index])
            index += 1

    @property
    def version(self) -> str:
        """The version of ggml."""
        version: bytes = self.base.ggml_version()
        return version.decode()

    @staticmethod
    def _pointer(library: ctypes.CDLL, name: str, *arguments: Any) -> ctypes.c_void_p:
        """The pointer that a function returns. Arguments are ctypes values."""
        function = library[name]
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*arguments))

    def call(self, kind: str, buffer: str, blocks: torch.Tensor, x: torch.Tensor) -> Call:
        """ggml_mul_mat of x and a weight of `blocks` in a buffer type, "plain" or "repacked"."""
        n, k, m = blocks.shape[0], x.shape[1], x.shape[0]

        def tensor(buffer: ctypes.c_void_p, kind: int, columns: int, rows: int) -> ctypes.c_void_p:
            context = self._pointer(self.base, "ggml_init", _InitParams(1 << 20, None, True))
            sizes = ctypes.c_int64(columns), ctypes.c_int64(rows)
            made = self._pointer(self.base, "ggml_new_tensor_2d", context, ctypes.c_int(kind), *sizes)
            self._allocate(context, buffer)
            return made

        weight = tensor(self.buffers[buffer], _GGML_TYPES[kind], k, n)
        store, fetch = self.base.ggml_backend_tensor_set, self.base.ggml_backend_tensor_get
        store.argtypes = fetch.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2
        store(weight, blocks.data_ptr(), 0, blocks.numel())
        rows = tensor(self.buffers["plain"], 0, k, m)
        store(rows, x.data_ptr(), 0, x.numel() * 4)
        context = self._pointer(self.base, "ggml_init", _InitParams(1 << 20, None, True))
        product = self._pointer(self.base, "ggml_mul_mat", context, weight, rows)
        graph = self._pointer(self.base, "ggml_new_graph", context)
        self.base.ggml_build_forward_expand(graph, product)
        self._allocate(context, self.buffers["plain"])
        out = torch.empty(m, n)
        compute = self.base.ggml_backend_graph_compute
        compute.argtypes = [ctypes.c_void_p] * 2

        def call() -> torch.Tensor:
            if compute(self.backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")
            return out

        call()
        fetch(product, out.data_ptr(), 0, out.numel() * 4)  # the result of the first call, for its error
        return call

    def _allocate(self, context: ctypes.c_void_p, buffer: ctypes.c_void_p) -> None:
        if not self._pointer(self.base, "ggml_backend_alloc_ctx_tensors_from_buft", context, buffer).value:
            raise MemoryError("ggml could not allocate its tensors")
