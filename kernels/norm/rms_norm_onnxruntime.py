"""RMSNorm by ONNX Runtime's CPU provider (Microsoft, MIT): its SimplifiedLayerNormalization, over torch's memory.

A graph of that one node, one session for each dtype, eps and number of threads; weights are inputs of the graph, so nothing is
prepacked, and their content may change in place. For comparison only: it runs when pinned, and in benchmarks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gristmill.kernel_registry.kernel import Config, Kernel
from gristmill.kernel_registry.problem import Problem
from gristmill.kernel_registry.requirement import Requirement

if TYPE_CHECKING:
    from gristmill.kernels.calls import RmsNormCall


@lru_cache(maxsize=64)
def _session(kind: str, eps: float, threads: int) -> Any:
    """A session, which owns its threads."""
    import onnxruntime
    from onnx import TensorProto, helper

    element = {"fp32": TensorProto.FLOAT, "fp16": TensorProto.FLOAT16}[kind]
    shapes = {"x": ["m", "n"], "weight": ["n"], "out": ["m", "n"]}
    values = {name: helper.make_tensor_value_info(name, element, shape) for name, shape in shapes.items()}
    node = helper.make_node(
        "SimplifiedLayerNormalization", ["x", "weight"], ["out"], axis=-1, epsilon=eps, stash_type=1
    )
    graph = helper.make_graph([node], "rms_norm", [values["x"], values["weight"]], [values["out"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def launch(config: Config, call: RmsNormCall) -> None:
    """x [..., N], weight [N] -> out [..., N]; rows that are not next to each other are copied."""
    import numpy
    import torch

    n = call.x.shape[-1]
    if call.x.numel() == 0:
        return
    rows = call.x.reshape(-1, n).contiguous()
    out_rows = call.out.view(-1, n) if call.out.is_contiguous() else torch.empty_like(rows)
    kind, element = ("fp32", numpy.float32) if call.x.dtype == torch.float32 else ("fp16", numpy.float16)
    session = _session(kind, float(call.eps), torch.get_num_threads())
    binding = session.io_binding()
    for name, tensor in (("x", rows), ("weight", call.weight)):
        binding.bind_input(name, "cpu", 0, element, tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("out", "cpu", 0, element, tuple(out_rows.shape), out_rows.data_ptr())
    session.run_with_iobinding(binding)
    if not call.out.is_contiguous():
        call.out.copy_(out_rows.view(call.out.shape))


def accepts(problem: Problem) -> str | None:
    """The provider for CPUs has this node for fp32 and fp16."""
    if problem.text("x") not in ("fp32", "fp16"):
        return f"ONNX Runtime normalises fp32 and fp16 on CPUs, not {problem.text('x')}"
    return None


KERNEL = Kernel(
    op="rms_norm",
    name="rms_norm_onnxruntime",
    provider="onnxruntime",
    language="python",
    target=f"{__name__}:launch",
    requires=Requirement(
        vendors=("cpu",),
        packages=(("onnxruntime", "1.17"), ("onnx", "1.14")),
        offers=("onnxruntime:InferenceSession", "onnx.helper:make_model"),
    ),
    summary="ONNX Runtime's SimplifiedLayerNormalization",
    accepts=accepts,
    auto=False,
)
