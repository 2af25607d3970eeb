"""Weight-only linear for Hopper at M > 16, warp-specialised (`gemm_ws.cuh`): linear_w4a16_gemm_ws_sm90 and
linear_w8a16_gemm_ws_sm90.

Two threads copy, the other warpgroups decode weights into wgmma's register operand. Weights are rounded to x's type once they are
scaled. What does not fill the machine evenly is dealt out along K, its sums added in a fixed order: results are bitwise
repeatable. docs/performance/log/linear_weight_only_large_m.md has the measurements, and what was tried.
"""

from __future__ import annotations

from gristmill.kernel_registry.kernel import Config, Workspace
from gristmill.kernel_registry.problem import Problem
from gristmill.kernels.linear.frag16_sm90 import gemm_ws
from gristmill.kernels.linear.frag16_sm90._kernel import Family, kernel


def workspace(problem: Problem, config: Config) -> Workspace:
    """Flags and partial sums, where tiles are dealt out along K."""
    return Workspace(gemm_ws.workspace_bytes(config), zeroed=bool(config["even"]))


GEMM_WS = Family(
    schedule=gemm_ws.SCHEDULE,
    ranked=gemm_ws.ranked,
    tried=1000,
    misfit=gemm_ws.misfit,
    rows=None,
    summary="M > 16: warp-specialised, {} decoded into the register operand of wgmma while the product before runs",
    priority=108,
    workspace=workspace,
    expected=gemm_ws.expected,
    gates=gemm_ws.gates,
)

KERNELS = (kernel("linear_w4a16_gemm_ws_sm90", GEMM_WS, 4), kernel("linear_w8a16_gemm_ws_sm90", GEMM_WS, 8))
