"""Facts of one architecture, as data, and the vocabulary of features.

An uncertain fact is None or an absent feature: a kernel then refuses with a reason instead of crashing.
"""

from __future__ import annotations

from dataclasses import dataclass

FEATURES: dict[str, str] = {
    # NVIDIA. "mma.X": the tensor cores multiply X, through mma.sync, wgmma or tcgen05, whichever the target has.
    "mma.f16": "tensor cores multiply float16",
    "mma.bf16": "tensor cores multiply bfloat16",
    "mma.tf32": "tensor cores multiply TF32",
    "mma.f64": "tensor cores multiply float64",
    "mma.int8": "tensor cores multiply int8",
    "mma.int4": "tensor cores multiply int4",
    "mma.fp8": "tensor cores multiply e4m3 and e5m2",
    "mma.block_scale": "tensor cores apply block scales (mxf8f6f4, mxf4, mxf4nvf4)",
    "mma.mxf8": "tensor cores multiply MXFP8 with its scales",
    "mma.mxf4": "tensor cores multiply MXFP4 with its scales",
    "mma.nvf4": "tensor cores multiply NVFP4 with its scales",
    "mma.sync.block_scale": "block-scaled mma.sync (warp level; sm_120 family)",
    "wgmma": "warpgroup mma of Hopper (wgmma.mma_async; sm_90a only)",
    "tcgen05": "fifth-generation tensor core instructions with tensor memory",
    "tcgen05.int8": "tcgen05.mma kind::i8",
    "dp4a": "dot product of four int8 (dp4a)",
    "cp_async": "cp.async, global to shared memory",
    "ldmatrix": "ldmatrix",
    "stmatrix": "stmatrix",
    "mbarrier": "mbarrier objects in shared memory",
    "tma": "cp.async.bulk.tensor (TMA)",
    "tma.multicast": "TMA multicast to the CTAs of a cluster at full speed",
    "clusters": "thread block clusters and distributed shared memory",
    "setmaxnreg": "setmaxnreg, moving registers between warps",
    "pdl": "programmatic dependent launch (griddepcontrol)",
    "cvt.fp4": "hardware conversion of e2m1",
    # Number formats common to all vendors.
    "fp8.ocp": "hardware converts OCP e4m3fn and e5m2",
    "fp8.fnuz": "hardware converts AMD's e4m3fnuz and e5m2fnuz (bias 8 and 16, no infinities)",
    "bf16.native": "hardware converts float32 to bfloat16",
    # AMD.
    "mfma": "matrix cores of CDNA (v_mfma)",
    "mfma.f16": "v_mfma on float16",
    "mfma.bf16": "v_mfma on bfloat16",
    "mfma.int8": "v_mfma on int8",
    "mfma.f64": "v_mfma on float64",
    "mfma.xf32": "v_mfma on xf32",
    "mfma.fp8": "v_mfma on fp8 (see fp8.fnuz, fp8.ocp for which)",
    "mfma.scale": "v_mfma_scale, block scales applied by the matrix core",
    "mfma.mxf8": "v_mfma_scale on MXFP8",
    "mfma.mxf4": "v_mfma_scale on MXFP4",
    "wmma": "wave matrix multiply of RDNA 3 and later (v_wmma)",
    "wmma.f16": "v_wmma on float16",
    "wmma.bf16": "v_wmma on bfloat16",
    "wmma.int8": "v_wmma on int8",
    "wmma.int4": "v_wmma on int4",
    "wmma.fp8": "v_wmma on fp8",
    "wmma.scale": "v_wmma_scale, block scales applied by the matrix unit",
    "wmma.mxf8": "v_wmma_scale on MXFP8",
    "wmma.mxf4": "v_wmma_scale on MXFP4",
    "wave32": "compilers use 32 lanes per wave",
    "wave64": "compilers use 64 lanes per wave",
    "dot2": "v_dot2_f32_f16",
    "dot2.bf16": "v_dot2_f32_bf16",
    "sdot4": "v_dot4_i32_i8",
    "sudot4": "v_dot4_i32_iu8",
    "load_lds": "loads from global memory straight to LDS, a dword per lane",
    "load_lds.b128": "loads from global memory straight to LDS, 16 bytes per lane",
    "tdm": "tensor data mover (tensor_load_to_lds)",
    # Intel GPU.
    "dpas": "systolic matrix multiply (XMX)",
    "dpas.f16": "dpas on float16",
    "dpas.bf16": "dpas on bfloat16",
    "dpas.tf32": "dpas on TF32",
    "dpas.int8": "dpas on int8",
    "block2d": "two-dimensional block loads and stores",
    "subgroup16": "sub-groups of 16 lanes",
    "subgroup32": "sub-groups of 32 lanes",
    # CPU.
    "avx2": "AVX2",
    "fma": "fused multiply-add of 256-bit vectors",
    "f16c": "conversion of float16",
    "avx512": "AVX-512 F, BW, VL, DQ",
    "avx512_vnni": "int8 dot products of 512-bit vectors",
    "avx512_bf16": "bfloat16 dot products of 512-bit vectors",
    "avx512_fp16": "float16 arithmetic of 512-bit vectors",
    "avx_vnni": "int8 dot products of 256-bit vectors, VEX-coded",
    "amx": "AMX tiles",
    "amx_int8": "AMX int8",
    "amx_bf16": "AMX bfloat16",
    "neon": "Advanced SIMD",
    "neon_dotprod": "int8 dot products (SDOT, UDOT)",
    "neon_i8mm": "int8 matrix multiply (SMMLA)",
    "neon_bf16": "bfloat16 dot products and matrix multiply (BFDOT, BFMMLA)",
    "neon_fp16": "float16 arithmetic",
    "sve": "Scalable Vector Extension",
    "sve2": "Scalable Vector Extension 2",
    "vx": "z/Architecture vector facility",
    "vxe": "z/Architecture vector enhancements (float32 vectors)",
}


@dataclass(frozen=True)
class ArchFacts:
    """Facts of one architecture; sizes in bytes, None = unknown.

    Attributes:
        smem_bytes: the limit per block of shared memory (NVIDIA, dynamic, opt-in), LDS (AMD) or SLM (Intel).
        smem_per_multiprocessor: shared memory of a multiprocessor, for all its blocks.
        registers: 32-bit registers per multiprocessor.
        max_registers: the limit per thread.
        wave_size: lanes of a warp, wave or sub-group as compilers give it by default; 0 for a CPU.
    """

    name: str
    vendor: str
    arch: str
    features: frozenset[str]
    title: str
    smem_bytes: int | None = None
    smem_per_multiprocessor: int | None = None
    registers: int | None = None
    max_registers: int | None = None
    wave_size: int = 0

    def __post_init__(self) -> None:
        strange = {f for f in self.features - FEATURES.keys() if not f.startswith(f"{self.vendor}:")}
        if strange:
            raise ValueError(f"{self.name}: features not in the vocabulary: {', '.join(sorted(strange))}")
