"""Selection cases written by hand: which kernel an operation gets on a target with an installation, and why
others are refused.

SELECTED: op | problem | target | build | policy | kernel, with @level for the code level of C++ kernels.

REFUSED: op | problem | target | build | policy | kernel | verdict | a part of the reason.

FAKE: kernel | target | build | `serves`, or verdict and a part of the reason. These kernels do not exist yet;
they test the boundaries between architectures.

`~mla` starts a problem as defined in PROBLEMS. Builds, policies and fake kernels are named below.
"""

from __future__ import annotations

from gristmill.kernel_registry.build import Build
from gristmill.kernel_registry.kernel import Kernel
from gristmill.kernel_registry.policy import Policy
from gristmill.kernel_registry.requirement import Requirement
from tests.registry.fakes import kernel

_TORCH = {"torch": "2.13.0"}
_TRITON = {**_TORCH, "triton": "3.9.0"}
_X86 = ("base", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
_CUDA = {"triton_backends": ("cuda",)}
_PAGED = tuple(f"flashinfer:Batch{kind}WithPagedKVCacheWrapper.plan" for kind in ("Prefill", "Decode"))
_FLASHINFER = frozenset(
    {"flashinfer.norm:rmsnorm", *_PAGED, "flashinfer.mla:BatchMLAPagedAttentionWrapper.plan"}
)
_HUMMING = frozenset({"humming.ops:humming_gemm", "humming.layer:HummingLayer"})
_DEEPGEMM = "deep_gemm:fp8_gemm_nt or vllm.third_party.deep_gemm:fp8_gemm_nt"
_AITER = frozenset({"aiter:gemm_a8w8", "aiter.ops.rmsnorm:rmsnorm2d_fwd"})
_ONNXRUNTIME = frozenset({"onnxruntime:InferenceSession", "onnx.helper:make_model"})

BUILDS: dict[str, Build] = {
    "none": Build.none(),
    "torch": Build.of(_TORCH),
    "torch-old": Build.of({"torch": "2.10.1", "triton": "3.9.0"}, **_CUDA),
    "cuda": Build.of(_TRITON, **_CUDA),
    "hip": Build.of(_TRITON, triton_backends=("hip",)),
    "both": Build.of(_TRITON, triton_backends=("cuda", "hip")),
    "xpu": Build.of(_TRITON, triton_backends=("xpu",)),
    "x86": Build.of(_TRITON, cpu_levels=_X86, machine="x86-64", **_CUDA),
    "x86-avx2": Build.of(_TRITON, cpu_levels=("base", "avx2"), machine="x86-64", **_CUDA),
    "x86-base": Build.of(_TORCH, cpu_levels=("base",), machine="x86-64"),
    "x86-interpreter": Build.of(_TRITON, cpu_levels=_X86, triton_interpreter=True, **_CUDA),
    "arm": Build.of(_TORCH, cpu_levels=("neon", "neon_dotprod", "neon_i8mm", "sve"), machine="aarch64"),
    "arm-neon": Build.of(_TORCH, cpu_levels=("neon",), machine="aarch64"),
    "s390x": Build.of(_TORCH, cpu_levels=("base",), machine="s390x"),
    "flashinfer": Build.of({**_TRITON, "flashinfer-python": "0.7.2"}, offers=_FLASHINFER, **_CUDA),
    "flashinfer-old": Build.of({**_TRITON, "flashinfer-python": "0.2.4"}, offers=_FLASHINFER, **_CUDA),
    "flashinfer-moved": Build.of(
        {**_TRITON, "flashinfer-python": "0.9.0"},
        **_CUDA,
        lacks=(("flashinfer.norm:rmsnorm", "flashinfer.norm offers no rmsnorm"),),
    ),
    "humming": Build.of({**_TRITON, "humming-kernels": "0.1.19"}, offers=_HUMMING, **_CUDA),
    "humming-old": Build.of({**_TRITON, "humming-kernels": "0.1.2"}, offers=_HUMMING, **_CUDA),
    "humming-other": Build.of({**_TRITON, "humming": "1.0"}, **_CUDA),
    "deepgemm": Build.of(_TRITON, offers=frozenset({_DEEPGEMM}), cuda_archs=("sm_90a",), **_CUDA),
    "deepgemm-other": Build.of(
        {**_TRITON, "deep-gemm": "0.0.1"},
        lacks=((_DEEPGEMM, "deep_gemm offers no fp8_gemm_nt"),),
        cuda_archs=("sm_90a",),
        **_CUDA,
    ),
    "aiter": Build.of(_TRITON, triton_backends=("hip",), offers=_AITER),
    "aiter-other": Build.of(
        {**_TRITON, "aiter": "0.13.2"},
        triton_backends=("hip",),
        lacks=tuple((offer, f"aiter is installed, but has no {offer}") for offer in sorted(_AITER)),
    ),
    "onnxruntime": Build.of(
        {**_TRITON, "onnxruntime": "1.31", "onnx": "1.23"}, cpu_levels=_X86, offers=_ONNXRUNTIME, **_CUDA
    ),
    "sm90a": Build.of(_TRITON, cuda_archs=("sm_90a",), **_CUDA),
    "ptx80": Build.of(_TRITON, cuda_archs=("compute_80", "sm_90a"), left_out=("compute_89",), **_CUDA),
    "ptx89": Build.of(_TRITON, cuda_archs=("compute_80", "compute_89", "sm_90a"), **_CUDA),
    "ptx75": Build.of(_TRITON, cuda_archs=("compute_75", "compute_80", "sm_90a"), **_CUDA),
    "turing": Build.of(_TRITON, cuda_archs=("compute_75",), **_CUDA),
    "ptx75-off": Build.of(_TRITON, cuda_archs=("compute_80", "sm_90a"), left_out=("compute_75",), **_CUDA),
    "family120": Build.of(_TRITON, cuda_archs=("compute_120f", "compute_80", "sm_90a"), **_CUDA),
    "blackwell": Build.of(
        {**_TRITON, "nvidia-cutlass-dsl": "4.2"},
        cuda_archs=("sm_100a", "sm_100f", "sm_120", "sm_120a", "sm_120f"),
        **_CUDA,
    ),
    "cutedsl": Build.of(
        {**_TRITON, "nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"},
        cuda_archs=("sm_90a",),
        **_CUDA,
    ),
    "cutedsl-old": Build.of(
        {**_TRITON, "nvidia-cutlass-dsl": "4.2", "apache-tvm-ffi": "0.1.15"}, cuda_archs=("sm_90a",), **_CUDA
    ),
    "cutedsl89": Build.of(
        {**_TRITON, "nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15"},
        cuda_archs=("compute_80", "compute_89", "sm_90a"),
        **_CUDA,
    ),
    "ampere": Build.of(_TRITON, cuda_archs=("sm_80",), **_CUDA),
    "ptx": Build.of(_TRITON, cuda_archs=("compute_80",), **_CUDA),
    "wave": Build.of(
        _TRITON,
        triton_backends=("hip",),
        hip_archs=("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151")
        + ("gfx1200", "gfx1201"),
    ),
    "wave-942": Build.of(_TRITON, triton_backends=("hip",), hip_archs=("gfx942",)),
    "rocm": Build.of(
        _TRITON, triton_backends=("hip",), hip_archs=("gfx942", "gfx950", "gfx11-generic", "gfx12-generic")
    ),
}

POLICIES: dict[str, Policy] = {
    "-": Policy(),
    "torch": Policy(pins={"*": ("*_torch",)}, strict=True),
    "triton": Policy(pins={"*": ("*_triton",)}, strict=True),
    "cpp": Policy(pins={"*": ("*_cpu",)}, strict=True),
    "prefer-torch": Policy(pins={"*": ("*_torch",)}),
    "prefer-gone": Policy(pins={"*": ("no_such_kernel",)}),
    "no-triton": Policy(exclude=("*triton*",)),
    "no-cpp": Policy(exclude=("*_cpu",)),
    "deterministic": Policy(deterministic=True),
    "invariant": Policy(batch_invariant=True),
    "flashinfer": Policy(pins={"*": ("*_flashinfer",)}),
    "flashinfer-det": Policy(pins={"*": ("*_flashinfer",)}, batch_invariant=True),
    "humming": Policy(pins={"linear": ("linear_humming",)}),
    "humming-det": Policy(pins={"linear": ("linear_humming",)}, deterministic=True),
    "deepgemm": Policy(pins={"linear": ("linear_deepgemm",)}),
    "aiter": Policy(pins={"*": ("*_aiter",)}),
    "onnxruntime": Policy(pins={"*": ("*_onnxruntime",)}),
    "cutedsl": Policy(pins={"linear": ("linear_*cutedsl_*",)}),
}

PROBLEMS = {
    "~paged": "q_tokens=2,seqs=2,max_q=1,max_ctx=64,total_ctx=128,heads=8,kv_heads=2",
    "~prompts": "q_tokens=600,seqs=4,max_q=512,max_ctx=2048,total_ctx=4000,heads=8,kv_heads=2",
    "~wide_group": "q_tokens=2,seqs=2,max_q=1,max_ctx=64,total_ctx=128,heads=9,kv_heads=1",
    "~mla": "q_tokens=2,seqs=2,max_q=1,max_ctx=64,total_ctx=128,heads=16",
    "~varlen": "q_tokens=64,seqs=2,max_q=32,max_ctx=64,total_ctx=128,heads=16,kv_heads=16",
}
"""Beginnings of problems that occur often in the tables."""

SELECTED = """
# rms_norm: every target of the tables, by the tools that this installation has
rms_norm | m=1,n=4096 | sm_70 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_75 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_80 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_86 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_87 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_89 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_90 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_100 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_103 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_110 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_120 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | sm_121 | cuda | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx906 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx90a | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx942 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx950 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1030 | hip | - | rms_norm_torch
rms_norm | m=1,n=4096 | gfx1100 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1101 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1102 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1150 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1151 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1200 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1201 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx1250 | hip | - | rms_norm_triton
rms_norm | m=1,n=4096 | xpu:pvc | xpu | - | rms_norm_triton
rms_norm | m=1,n=4096 | xpu:bmg | both | - | rms_norm_torch
rms_norm | m=1,n=4096 | cpu:base | x86 | - | rms_norm_cpu@base
rms_norm | m=1,n=4096 | cpu:avx2 | x86 | - | rms_norm_cpu@avx2
rms_norm | m=1,n=4096 | cpu:avx512 | x86 | - | rms_norm_cpu@avx512
rms_norm | m=1,n=4096 | cpu:neon | arm | - | rms_norm_cpu@neon
rms_norm | m=1,n=4096 | cpu:sve | arm-neon | - | rms_norm_cpu@neon
rms_norm | m=1,n=4096 | cpu:vxe | s390x | - | rms_norm_cpu@base
rms_norm | m=1,n=4096 | cpu:vxe | x86 | - | rms_norm_torch
rms_norm | m=1,n=4096 | cpu:neon | x86 | - | rms_norm_torch
rms_norm | m=1,n=4096 | cpu:avx2 | torch | - | rms_norm_torch
rms_norm | m=1,n=4096 | sm_90 | torch | - | rms_norm_torch
rms_norm | m=1,n=4096 | h200 | flashinfer | flashinfer | rms_norm_flashinfer
rms_norm | m=1,n=4096 | sm_90 | flashinfer | - | rms_norm_triton
rms_norm | m=1,n=4096,x=fp32 | sm_90 | flashinfer | flashinfer | rms_norm_triton
rms_norm | m=1,n=4096 | sm_90 | flashinfer-moved | flashinfer | rms_norm_triton
rms_norm | m=1,n=4096 | gfx942 | aiter | aiter | rms_norm_aiter
rms_norm | m=1,n=4096 | gfx942 | aiter | - | rms_norm_triton
rms_norm | m=1,n=4096 | gfx942 | aiter-other | aiter | rms_norm_triton
rms_norm | m=1,n=4096,x=fp32 | cpu:avx2 | onnxruntime | onnxruntime | rms_norm_onnxruntime
rms_norm | m=1,n=4096,x=fp32 | cpu:avx2 | onnxruntime | - | rms_norm_cpu
rms_norm | m=0,n=4096 | sm_90 | cuda | torch | rms_norm_torch
rms_norm | m=1,n=4096 | cpu:avx2 | x86-interpreter | triton | rms_norm_triton
rms_norm | m=1,n=4096 | cpu:avx2 | x86-interpreter | - | rms_norm_cpu@avx2
rms_norm | m=1,n=4096 | sm_90 | cuda | no-triton | rms_norm_torch
rms_norm | m=1,n=4096 | sm_90 | cuda | prefer-gone | rms_norm_triton
rms_norm | m=1,n=4096 | sm_90 | cuda | prefer-torch | rms_norm_torch
rms_norm | m=1,n=4096 | cpu:avx2 | x86 | no-cpp | rms_norm_torch
# a CPU gets the best level that it runs whole, is compiled, and the kernel has
linear | m=16,n=4096,k=4096,w=int8_ch | cpu:avx512-avx512 | x86 | - | linear_cpu@avx2
linear | m=16,n=4096,k=4096,w=int8_ch | cpu:avx512_vnni-avx512_vnni | x86 | - | linear_cpu@avx512
linear | m=16,n=4096,k=4096,w=int8_ch | cpu:avx512_vnni | x86-avx2 | - | linear_cpu@avx2
linear | m=16,n=4096,k=4096,w=int8_ch | cpu:avx2 | x86 | - | linear_cpu@avx2
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx2 | x86 | - | linear_cpu@avx2
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:amx | x86-avx2 | - | linear_cpu@avx2
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx2-fma | x86 | - | linear_cpu@base
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx512 | x86-base | - | linear_cpu@base
fused_add_rms_norm | m=16,n=4096 | cpu:avx512_bf16 | x86-avx2 | - | fused_add_rms_norm_cpu@avx2
silu_and_mul | m=16,n=4096 | cpu:avx512_vnni-avx512_vnni-avx512 | x86 | - | silu_and_mul_cpu@avx2
paged_attention | ~paged | cpu:avx512 | x86-avx2 | - | paged_attention_cpu@avx2
paged_attention | ~paged | sm_80 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~paged,head_dim=64,x=fp16,sinks=true,window=128 | sm_86 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~paged,head_dim=256,softcap=true,lse=true | sm_89 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~paged,head_dim=96,block_size=7 | sm_120 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~prompts | sm_80 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~prompts,head_dim=64,x=fp16,sinks=true,window=128 | sm_89 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~prompts,head_dim=256,softcap=true | sm_120 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~prompts,kv=fp8,kv_scale=token | sm_80 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~prompts,kv=fp8,kv_scale=head,head_dim=64,x=fp16,sinks=true,window=128 | sm_86 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~prompts,kv=fp8,kv_scale=head,head_dim=256,softcap=true | sm_89 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~prompts,head_dim=80 | sm_86 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~prompts,head_dim=192,lse=true | sm_120 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~prompts | sm_75 | ptx80 | - | paged_attention_triton_split
paged_attention | ~prompts,head_dim=128,x=fp32 | sm_86 | ptx80 | - | paged_attention_triton_split
paged_attention | ~paged,kv=fp8,kv_scale=head | sm_89 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~paged,kv=fp8,kv_scale=token,head_dim=256,x=fp16 | sm_80 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~paged,kv=fp8,kv_scale=head,head_dim=112 | sm_86 | ptx80 | - | paged_attention_triton_split
paged_attention | ~paged,head_dim=112 | sm_86 | ptx80 | - | paged_attention_triton_split
paged_attention | ~paged | sm_86 | cuda | - | paged_attention_triton_split
paged_attention | ~paged | sm_80 | ptx80 | invariant | paged_attention_triton
# linear: every scheme somewhere
linear | m=16,n=4096,k=4096 | sm_90 | cuda | - | linear_torch
linear | m=16,n=4096,k=4096,x=fp16,w=fp16 | sm_75 | cuda | - | linear_torch
linear | m=16,n=4096,k=4096,x=fp32,w=fp32 | sm_120 | cuda | - | linear_torch
linear | m=16,n=4096,k=4096 | sm_90 | torch | - | linear_torch
linear | m=16,n=4096,k=4096 | cpu:avx2 | x86 | - | linear_cpu@avx2
linear | m=16,n=4096,k=4096,w=int4_g32 | sm_80 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g64 | sm_86 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_120 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_121 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_110 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_100 | sm90a | - | linear_w_triton
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_90 | sm90a | - | linear_w4a16_decode_sm90
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_80 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_86 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=8,n=14336,k=4096,w=int4_g128_zp | sm_89 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=1,n=4096,k=14336,w=int4_g32,x=fp16 | sm_100 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=5,n=4097,k=1000,w=int4_g64_zp,epilogue=bias+residual | sm_103 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=2,n=4096,k=4096,w=int4_ch | sm_120 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=16,n=4096,k=4096,w=int4_g64,act_order=true | sm_121 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=17,n=4096,k=4096,w=int4_g128 | sm_80 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=64,n=14336,k=4096,w=int4_g128_zp,x=fp16 | sm_86 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=256,n=4096,k=14336,w=int4_g32_zp,act_order=true | sm_89 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=2048,n=4096,k=4096,w=int4_ch | sm_100 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=4096,n=4098,k=1000,w=int4_g64,epilogue=bias+silu_mul | sm_120 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=1,n=4096,k=4096,w=mxfp4 | sm_80 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=16,n=4097,k=4096,w=mxfp4,x=fp16 | sm_89 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=64,n=4096,k=14336,w=mxfp4 | sm_86 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=4,n=14336,k=4096,w=nvfp4,epilogue=bias+residual | sm_86 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=64,n=4096,k=4096,w=nvfp4,x=fp16 | sm_89 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=1,n=4096,k=4096,w=int8_ch | sm_80 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=16,n=4096,k=4096,w=int8_ch | sm_86 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=64,n=4096,k=4096,w=int8_ch | sm_89 | ptx80 | - | linear_w8a16_gemm_sm80
linear | m=8,n=4096,k=4096,w=int8_g32,x=fp16 | sm_121 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=300,n=4096,k=4096,w=int8_g32 | sm_86 | ptx80 | - | linear_w8a16_gemm_sm80
linear | m=17,n=4096,k=4096,w=int8_g128,act_order=true | sm_120 | ptx80 | - | linear_w8a16_gemm_sm80
linear | m=1,n=4096,k=4096,w=fp8_ch | sm_80 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=16,n=4096,k=4096,w=fp8 | sm_86 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=16,n=4096,k=4096,w=fp8_block | sm_89 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=64,n=4096,k=4096,w=fp8_block,epilogue=bias+silu_mul | sm_80 | ptx80 | - | linear_w8a16_gemm_sm80
linear | m=64,n=4096,k=4100,w=fp8_ch,x=fp16 | sm_103 | ptx80 | - | linear_w8a16_gemm_sm80
linear | m=1,n=4096,k=4096,w=int4_g32_min | sm_80 | ptx80 | - | linear_gguf_decode_sm80
linear | m=16,n=4096,k=14336,w=int4_g32_min,x=fp16 | sm_86 | ptx80 | - | linear_gguf_decode_sm80
linear | m=8,n=4097,k=1024,w=int5_g32,epilogue=bias+residual | sm_89 | ptx80 | - | linear_gguf_decode_sm80
linear | m=3,n=4096,k=4096,w=int5_g32_min,act_order=true | sm_120 | ptx80 | - | linear_gguf_decode_sm80
linear | m=1,n=151936,k=4096,w=int6_g16 | sm_121 | ptx80 | - | linear_gguf_decode_sm80
linear | m=4,n=4096,k=4096,w=int6_g16 | sm_90 | ptx80 | - | linear_gguf_decode_sm80
linear | m=17,n=4096,k=4096,w=int4_g32_min | sm_80 | ptx80 | - | linear_gguf_gemm_sm80
linear | m=256,n=14336,k=4096,w=int5_g32_min,epilogue=bias+silu_mul | sm_86 | ptx80 | - | linear_gguf_gemm_sm80
linear | m=2048,n=4096,k=4096,w=int6_g16,x=fp16 | sm_100 | ptx80 | - | linear_gguf_gemm_sm80
linear | m=64,n=4096,k=4096,w=int5_g32 | sm_90 | ptx80 | - | linear_gguf_gemm_sm80
linear | m=16,n=4096,k=4096,w=int8_ch | sm_90 | ptx80 | - | linear_w8a16_decode_ws_sm90
linear | m=17,n=4096,k=4096,w=int4_g128 | sm_90 | ptx80 | - | linear_w4a16_gemm_ws_sm90
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_90 | ptx80 | - | linear_w4a16_decode_sm90
linear | m=17,n=4096,k=4096,w=int4_g128 | sm_90 | sm90a | - | linear_w4a16_gemm_ws_sm90
linear | m=1,n=4096,k=4096 | sm_90 | sm90a | - | linear_dense_decode_sm90
linear | m=16,n=256,k=7168,x=fp16,w=fp16 | sm_90 | sm90a | - | linear_dense_decode_sm90
linear | m=17,n=4096,k=4096 | sm_90 | sm90a | - | linear_torch
linear | m=257,n=4096,k=4096,w=int4_g128 | sm_90 | sm90a | - | linear_w4a16_gemm_ws_sm90
linear | m=64,n=28672,k=4096,w=int4_g128 | sm_90 | sm90a | - | linear_w4a16_gemm_ws_sm90
linear | m=1,n=4096,k=4096,w=int4_g64 | sm_90 | sm90a | - | linear_w4a16_decode_sm90
linear | m=16,n=4096,k=4096,w=nvfp4 | sm_90 | sm90a | - | linear_w4a16_decode_sm90
linear | m=33,n=4096,k=4096,w=nvfp4 | sm_90 | sm90a | - | linear_w4a16_gemm_ws_sm90
linear | m=33,n=4096,k=4096,w=int8_ch | sm_90 | sm90a | - | linear_w8a16_gemm_ws_sm90
linear | m=4,n=4096,k=4096,w=fp8_block | sm_90 | sm90a | - | linear_w8a16_decode_sm90
linear | m=16,n=4096,k=4096,w=int4_ch | gfx90a | hip | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128_zp | gfx1201 | hip | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g32_zp | gfx1100 | hip | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | gfx1030 | hip | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=int8_ch | sm_75 | cuda | - | linear_w_triton
# skinny products on AMD GPUs: in HIP where there is a code object, M is small and K comes in whole 16 bytes
linear | m=1,n=4096,k=4096 | gfx1100 | wave | - | linear_wv_splitk_hip
linear | m=4,n=4096,k=4096 | gfx1100 | wave | - | linear_wv_splitk_hip
linear | m=64,n=4096,k=4096 | gfx1100 | wave | - | linear_torch
linear | m=1,n=4096,k=4096 | gfx942 | wave | - | linear_wv_splitk_hip
linear | m=4,n=4096,k=4096 | gfx942 | wave | - | linear_wv_splitk_hip
linear | m=64,n=4096,k=4096 | gfx942 | wave | - | linear_torch
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx1100 | wave | - | linear_w_wv_splitk_hip
linear | m=4,n=4096,k=4096,w=int4_g128 | gfx1100 | wave | - | linear_w_wv_splitk_hip
linear | m=64,n=4096,k=4096,w=int4_g128 | gfx1100 | wave | - | linear_w_triton
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx942 | wave | - | linear_w_wv_splitk_hip
linear | m=4,n=4096,k=4096,w=int4_g128 | gfx942 | wave | - | linear_w_wv_splitk_hip
linear | m=64,n=4096,k=4096,w=int4_g128 | gfx942 | wave | - | linear_w_triton
linear | m=8,n=11008,k=4096 | gfx90a | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx950 | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx1101 | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx1102 | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx1150 | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx1151 | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx1200 | wave | - | linear_wv_splitk_hip
linear | m=8,n=11008,k=4096 | gfx1201 | wave | - | linear_wv_splitk_hip
linear | m=8,n=4096,k=11008,x=fp16,w=int8_ch,epilogue=bias | gfx1201 | wave | - | linear_w_wv_splitk_hip
linear | m=2,n=4096,k=4096,x=fp16,w=fp16,epilogue=silu_mul | mi300x | wave | - | linear_wv_splitk_hip
linear | m=3,n=4096,k=4096,w=int4_g32_zp | strixhalo | wave | - | linear_w_wv_splitk_hip
linear | m=9,n=4096,k=4096,w=int4_g128 | gfx1100 | wave | - | linear_w_triton
linear | m=1,n=4096,k=4096,w=mxfp4 | gfx1100 | wave | - | linear_w_triton
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx1030 | wave | - | linear_dequant_torch
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx1100 | wave-942 | - | linear_w_triton
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx1250 | wave | - | linear_w_triton
linear | m=1,n=4096,k=4096 | gfx1100 | wave | torch | linear_torch
linear | m=1,n=4096,k=4096 | gfx1100 | wave | triton | linear_triton
linear | m=16,n=4096,k=4096,w=int8_g128 | gfx950 | hip | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=fp8 | sm_80 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=fp8_ch | gfx942 | hip | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=fp8_block | gfx942 | hip | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=fp8_block | sm_89 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=mxfp8 | sm_90 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=mxfp4 | sm_90 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=nvfp4 | sm_121 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=nvfp4 | cpu:avx512 | x86 | - | linear_cpu@avx512
linear | m=16,n=4096,k=4096,w=mxfp4 | cpu:neon | arm | - | linear_cpu@neon
linear | m=16,n=4096,k=4096,w=nvfp4 | sm_90 | torch | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | cuda | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | deepgemm | deepgemm | linear_deepgemm
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | deepgemm | - | linear_w8a8_sm90
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | deepgemm-other | deepgemm | linear_w8a8_sm90
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | cpu:avx512_vnni | x86 | - | linear_a8_cpu@avx512_vnni
linear | m=16,n=4096,k=4096,w=int4_g128.int8_g128 | cpu:avx2 | x86 | - | linear_a8_cpu@avx2
linear | m=1,n=4096,k=4096,w=int4_g32_min.int8_g32 | cpu:avx2 | x86 | - | linear_a8_groups_cpu@avx2
linear | m=1,n=4096,k=4096,w=int6_g16.int8_g32 | cpu:avx512_vnni | x86 | - | linear_a8_groups_cpu@avx512_vnni
linear | m=64,n=4096,k=4096,w=int8_g32.int8_g32 | cpu:avx2 | x86 | - | linear_a8_groups_cpu@avx2
linear | m=16,n=4096,k=4096,w=int4_g128.int8_g128 | cpu:avx2 | torch | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx942 | aiter | aiter | linear_aiter
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx950 | aiter | aiter | linear_aiter
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx942 | aiter | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming | humming | linear_humming
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming | - | linear_humming
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | cuda | - | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming-old | humming | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming | humming-det | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128,act_order=true | sm_90 | humming | humming | linear_w_triton
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx2 | x86 | invariant | linear_cpu@avx2
# the other operations
fused_add_rms_norm | m=16,n=4096 | sm_121 | cuda | - | fused_add_rms_norm_triton
fused_add_rms_norm | m=16,n=4096 | gfx1030 | both | - | fused_add_rms_norm_torch
silu_and_mul | m=16,n=4096 | sm_120 | cuda | - | silu_and_mul_triton
silu_and_mul | m=16,n=4096 | cpu:avx2 | x86 | - | silu_and_mul_cpu@avx2
silu_and_mul_quant | m=16,n=4096 | gfx942 | hip | - | silu_and_mul_quant_triton
silu_and_mul_quant | m=16,n=4096,q=int8,format=int8_token | cpu:avx2 | x86 | - | silu_and_mul_quant_cpu@avx2
rms_norm_quant | m=16,n=4096,format=fp8_g128,residual=true | sm_90 | cuda | - | rms_norm_quant_triton
rms_norm_quant | m=16,n=20000 | sm_90 | cuda | - | rms_norm_quant_torch
rms_norm_quant | m=16,n=4096,format=fp8 | cpu:avx2 | x86 | - | rms_norm_quant_cpu@avx2
rotary_embedding | t=16,hq=32,hk=8,d=128,rot=128 | sm_103 | cuda | - | rotary_embedding_triton
rotary_embedding | t=16,hq=32,hk=8,d=128,rot=64,style=gptj | gfx942 | hip | - | rotary_embedding_triton
rotary_embedding | t=16,hq=32,hk=8,d=128,rot=128 | cpu:neon_i8mm | arm | - | rotary_embedding_cpu@neon_i8mm
reshape_and_cache | t=16,h=8,d=128,dv=128 | sm_110 | cuda | - | reshape_and_cache_triton
reshape_and_cache | t=16,h=8,d=128,dv=128 | cpu:avx2 | x86 | - | reshape_and_cache_cpu@avx2
qk_norm_rope_cache | t=16,heads=32,kv_heads=8,head_dim=128,rot=128,norm=true | sm_90 | cuda | - | qk_norm_rope_cache_triton
qk_norm_rope_cache | t=16,heads=32,kv_heads=8,head_dim=128,rot=128,kv=fp8,kv_scale=token | cpu:avx2 | x86 | - | qk_norm_rope_cache_cpu@avx2
qk_norm_rope_cache | t=16,heads=32,kv_heads=8,head_dim=2048,rot=64,kv=fp8,kv_scale=head | cpu:avx2 | torch | - | qk_norm_rope_cache_torch
all_reduce | m=16,n=4096,world=2 | h200 | cuda | - | all_reduce_torch
all_reduce | m=16,n=4096,world=2 | h200 | sm90a | - | all_reduce_one_shot_sm90
all_reduce | m=4096,n=4096,world=2 | h200 | sm90a | - | all_reduce_two_shot_sm90
all_reduce_add_rms_norm | m=16,n=4096,world=2 | h200 | sm90a | - | all_reduce_add_rms_norm_sm90
all_reduce_add_rms_norm | m=4096,n=4096,world=2 | h200 | sm90a | - | all_reduce_add_rms_norm_sm90
all_reduce_add_rms_norm | m=4096,n=4096,world=4 | h200 | sm90a | - | all_reduce_add_rms_norm_triton
all_reduce_add_rms_norm | m=16,n=4096,world=4 | cpu:avx2 | x86 | - | all_reduce_add_rms_norm_cpu@avx2
all_reduce | m=16,n=4096,world=4 | cpu:avx2 | x86 | - | all_reduce_torch
all_gather | m=16,n=4096,world=2 | h200 | cuda | - | all_gather_torch
all_gather | m=16,n=4096,world=2 | h200 | sm90a | - | all_gather_sm90
all_to_all | m=16,n=4096,world=2 | h200 | sm90a | - | all_to_all_sm90
all_to_all | m=16,n=4096,world=2 | cpu:avx2 | x86 | - | all_to_all_torch
reshape_and_cache_mla | t=16 | gfx950 | hip | - | reshape_and_cache_mla_triton
reshape_and_cache_mla | t=16 | xpu:lnl | torch | - | reshape_and_cache_mla_torch
gelu_and_mul | m=16,n=4096,approximate=tanh | sm_90 | cuda | - | gelu_and_mul_triton
gelu_and_mul | m=16,n=4096 | cpu:avx2 | x86 | - | gelu_and_mul_cpu@avx2
gelu_and_mul | m=16,n=4096 | sm_80 | cuda | - | gelu_and_mul_triton
activation | m=16,n=3072 | sm_90 | cuda | - | activation_triton
activation | m=16,n=3072,function=relu2 | cpu:avx512 | x86 | - | activation_cpu@avx512
activation | m=16,n=3072,function=silu | cpu:avx2 | cuda | - | activation_torch
linear_fp32 | m=16,n=256,k=7168 | h200 | cuda | - | linear_fp32_triton
linear_fp32 | m=4096,n=128,k=2048,w=fp32 | gfx942 | hip | - | linear_fp32_triton
linear_fp32 | m=16,n=256,k=7168 | sm_90 | torch | - | linear_fp32_torch
linear_fp32 | m=16,n=256,k=7168 | sm_90 | cuda | invariant | linear_fp32_invariant_triton
linear_fp32 | m=16,n=256,k=7168 | cpu:avx2 | x86 | - | linear_fp32_torch
layer_norm | m=16,n=4096 | sm_90 | cuda | - | layer_norm_triton
layer_norm | m=16,n=4096 | cpu:avx2 | x86 | - | layer_norm_cpu@avx2
layer_norm | m=16,n=768,bias=true,residual=true | sm_86 | cuda | - | layer_norm_triton
copy_blocks | t=16,rows=64,words=8192 | sm_90 | cuda | - | copy_blocks_triton
copy_blocks | t=16,rows=64,words=8192 | cpu:avx2 | x86 | - | copy_blocks_torch
merge_attention_states | t=16,h=8,d=128 | sm_89 | cuda | - | merge_attention_states_triton
merge_attention_states | t=16,h=8,d=128 | cpu:avx2 | x86 | - | merge_attention_states_cpu@avx2
paged_attention | ~paged | sm_90 | cuda | - | paged_attention_triton_split
paged_attention | ~paged | sm_90 | sm90a | - | paged_attention_sm90_split
paged_attention | ~paged,head_dim=256 | sm_90 | sm90a | - | paged_attention_sm90_split
paged_attention | ~paged,head_dim=192 | sm_90 | sm90a | invariant | paged_attention_sm90
paged_attention | ~paged | sm_90 | cuda | invariant | paged_attention_triton
paged_attention | ~paged,softcap=true | sm_90 | cuda | invariant | paged_attention_triton
paged_attention | ~paged | sm_90 | flashinfer | flashinfer | paged_attention_flashinfer
paged_attention | ~paged,sinks=true | sm_90 | flashinfer | flashinfer | paged_attention_triton_split
paged_attention | ~paged,head_dim=512 | sm_90 | cuda | - | paged_attention_torch
mla_attention | ~mla | sm_90 | cuda | - | mla_attention_triton_split
mla_attention | ~mla | gfx942 | hip | invariant | mla_attention_triton
mla_attention | ~mla | sm_90 | flashinfer | flashinfer | mla_attention_flashinfer
mla_attention | ~mla | cpu:avx2 | x86 | - | mla_attention_cpu@avx2
varlen_attention | ~varlen | sm_120 | cuda | - | varlen_attention_triton
varlen_attention | ~varlen | sm_90 | sm90a | - | varlen_attention_sm90
varlen_attention | ~varlen,lse=true,x=fp16 | sm_90 | sm90a | invariant | varlen_attention_sm90
varlen_attention | ~varlen,qk_dim=256 | sm_90 | sm90a | - | varlen_attention_triton
varlen_attention | ~varlen,window_right=-1 | sm_90 | sm90a | - | varlen_attention_sm90
varlen_attention | ~varlen,qk_dim=64,v_dim=64,window_left=64,window_right=64 | sm_90 | sm90a | invariant | varlen_attention_sm90
varlen_attention | ~varlen,qk_dim=96,v_dim=96,window_left=63 | sm_90 | sm90a | - | varlen_attention_sm90
varlen_attention | ~varlen,qk_dim=256,v_dim=256,window_left=512,window_right=512 | sm_90 | sm90a | - | varlen_attention_triton
varlen_attention | ~varlen,qk_dim=32,v_dim=32,window_right=-1 | sm_90 | sm90a | - | varlen_attention_triton
varlen_attention | ~varlen,window_right=-1 | sm_120 | cuda | - | varlen_attention_triton
varlen_attention | ~varlen,window_left=64,window_right=64 | cpu:avx512 | x86 | - | varlen_attention_cpu@avx512
varlen_attention | ~varlen | gfx1030 | hip | - | varlen_attention_torch
varlen_attention | ~varlen | cpu:avx2 | x86 | - | varlen_attention_cpu@avx2
grouped_topk | m=16,e=256,top_k=8,n_group=8,topk_group=4 | sm_80 | cuda | - | grouped_topk_triton
grouped_topk | m=16,e=256,top_k=8,n_group=8,topk_group=4 | cpu:avx2 | x86 | - | grouped_topk_cpu@avx2
grouped_topk | m=16,e=256,top_k=8,n_group=8,topk_group=4 | xpu:dg2 | both | - | grouped_topk_torch
route | m=16,e=256,local=256,top_k=8 | sm_80 | cuda | - | route_triton
route | m=16,e=256,local=256,top_k=8 | sm_90 | sm90a | - | route_sm90
route | m=65,e=256,local=256,top_k=8 | sm_90 | sm90a | - | route_chain_sm90
route | m=16,e=256,local=256,top_k=8 | cpu:avx2 | x86 | - | route_cpu@avx2
permute | m=16,top_k=8,e=256 | sm_90 | cuda | - | permute_triton
permute | m=16,top_k=8,e=256 | cpu:avx2 | x86 | - | permute_cpu@avx2
grouped_linear | m=16,e=128,n=1536,k=2048,w=int4_g128 | sm_121 | cuda | - | grouped_linear_w_triton
grouped_linear | m=16,e=128,n=1536,k=2048,w=int4_g128 | sm_80 | ptx80 | - | grouped_linear_sm80
grouped_linear | m=256,e=64,n=1536,k=2048,w=int4_g32_zp,x=fp16,epilogue=silu_mul,gather=8 | sm_86 | ptx80 | - | grouped_linear_sm80
grouped_linear | m=16,e=32,n=5760,k=2880,w=mxfp4,epilogue=bias+silu_mul+clamp | sm_89 | ptx80 | - | grouped_linear_sm80
grouped_linear | m=64,e=16,n=2048,k=1024,w=fp8_block | sm_120 | ptx80 | - | grouped_linear_sm80
grouped_linear | m=64,e=16,n=2050,k=1024,w=int8_g32,epilogue=bias | sm_100 | ptx80 | - | grouped_linear_sm80
grouped_linear | m=4096,e=16,n=2048,k=1024,w=int6_g16 | sm_90 | ptx80 | - | grouped_linear_sm80
grouped_linear | m=16,e=16,n=2048,k=1024,w=int4_g128 | sm_90 | ptx80 | - | grouped_linear_sm90
grouped_linear | m=16,e=16,n=2048,k=1020,w=int4_ch | sm_80 | ptx80 | - | grouped_linear_w_triton
grouped_linear | m=16,e=128,n=1536,k=2048 | gfx942 | hip | - | grouped_linear_triton
grouped_linear | m=512,e=128,n=1536,k=2048,epilogue=silu_mul,gather=8 | sm_90 | cutedsl | - | grouped_linear_cutedsl_sm90
grouped_linear | m=512,e=128,n=1536,k=2048,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,x=fp16,w=fp16 | sm_103 | cutedsl | - | grouped_linear_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048 | sm_110 | cutedsl | - | grouped_linear_triton
grouped_linear | m=512,e=128,n=1536,k=2048 | sm_120 | cutedsl | - | grouped_linear_triton
grouped_linear | m=512,e=128,n=1536,k=2048 | sm_90 | cutedsl-old | - | grouped_linear_dense_sm90
grouped_linear | m=512,e=128,n=1536,k=2040,gather=8 | sm_100 | cutedsl | - | grouped_linear_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2044,gather=8 | sm_100 | cutedsl | - | grouped_linear_triton
linear | m=1,n=4096,k=4096,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | linear_block_scaled_cutedsl_sm100
linear | m=4096,n=28672,k=4096,x=fp16,w=nvfp4.nvfp4,epilogue=silu_mul | sm_103 | cutedsl | - | linear_block_scaled_cutedsl_sm100
linear | m=64,n=4096,k=2880,w=mxfp4.mxfp4,epilogue=bias+residual | sm_100 | cutedsl | - | linear_block_scaled_cutedsl_sm100
linear | m=64,n=4096,k=4096,w=mxfp4.mxfp8 | sm_103 | cutedsl | - | linear_block_scaled_cutedsl_sm100
linear | m=257,n=4096,k=4128,w=mxfp8.mxfp8 | sm_100 | cutedsl | - | linear_block_scaled_cutedsl_sm100
linear | m=64,n=4096,k=2880,w=mxfp4.mxfp8 | sm_100 | cutedsl | - | linear_mx_triton
linear | m=64,n=4100,k=4096,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | linear_nvfp4_triton
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_110 | cutedsl | - | linear_nvfp4_triton
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | cutedsl | - | linear_nvfp4_triton
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_90 | cutedsl | - | linear_dequant_torch
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_100 | cutedsl-old | - | linear_nvfp4_triton
moe | m=64,top_k=8,e=128,h=2048,i=768 | sm_100 | cutedsl | - | moe_cutedsl_sm100
linear | m=512,n=4096,k=4096 | sm_100 | cutedsl | - | linear_torch
linear | m=512,n=4096,k=4096 | sm_100 | cutedsl | cutedsl | linear_cutedsl_sm100
linear | m=1,n=4096,k=4096,x=fp16,w=fp16,epilogue=bias+residual+silu_mul | sm_103 | cutedsl | cutedsl | linear_cutedsl_sm100
linear | m=512,n=4096,k=4096 | sm_90 | cutedsl89 | cutedsl | linear_torch
linear | m=512,n=4096,k=4096 | sm_110 | cutedsl89 | cutedsl | linear_torch
linear | m=512,n=4096,k=4096 | sm_120 | cutedsl89 | cutedsl | linear_torch
linear | m=512,n=4096,k=4096,x=fp16 | sm_100 | cutedsl89 | cutedsl | linear_torch
linear | m=512,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_100 | cutedsl89 | cutedsl | linear_fp8_cutedsl_sm100
linear | m=512,n=4096,k=4096,w=fp8_ch.fp8_token,epilogue=silu_mul | sm_103 | cutedsl89 | cutedsl | linear_fp8_cutedsl_sm100
linear | m=512,n=4096,k=4096,x=fp16,w=fp8.fp8_token,codes=true | sm_100 | cutedsl89 | cutedsl | linear_fp8_cutedsl_sm100
linear | m=512,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_100 | cutedsl89 | - | linear_fp8_cutedsl_sm100
linear | m=1,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_103 | cutedsl89 | - | linear_fp8_cutedsl_sm100
linear | m=512,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_110 | cutedsl89 | - | linear_w8a8_sm89
linear | m=512,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_120 | cutedsl89 | cutedsl | linear_w8a8_sm89
linear | m=512,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | cutedsl89 | cutedsl | linear_w8a8_sm90
moe | m=64,top_k=8,e=128,h=2048,i=768 | sm_90 | cutedsl | - | moe_dense_sm90
grouped_linear | m=16,e=128,n=1536,k=2048,w=mxfp4 | cpu:avx2 | x86 | - | grouped_linear_cpu@avx2
grouped_linear | m=16,e=128,n=1536,k=2048,w=nvfp4 | gfx1030 | hip | - | grouped_linear_torch
combine | m=16,top_k=8,h=7168 | sm_75 | cuda | - | combine_triton
combine | m=16,top_k=8,h=7168 | cpu:neon | arm | - | combine_cpu@neon
moe | m=16,top_k=8,e=128,h=2048,i=768 | sm_120 | cuda | - | moe_chain_triton
moe | m=1,top_k=8,e=128,h=2048,i=768 | gfx942 | hip | - | moe_few_tokens_triton
moe | m=1,top_k=8,e=128,h=2048,i=768 | sm_90 | cutedsl | - | moe_dense_sm90
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block | gfx950 | hip | - | moe_chain_w_triton
moe | m=1,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_80 | ptx80 | - | moe_sm80
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128_zp,x=fp16 | sm_86 | ptx80 | - | moe_sm80
moe | m=64,top_k=8,e=128,h=2048,i=768,w=nvfp4 | sm_89 | ptx80 | - | moe_sm80
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp | sm_86 | ptx80 | - | moe_sm80
moe | m=300,top_k=8,e=128,h=2048,i=768,w=int8_ch | sm_120 | ptx80 | - | moe_sm80
moe | m=4096,top_k=8,e=256,h=7168,i=2048,w=fp8_block | sm_103 | ptx80 | - | moe_sm80
moe | m=1,top_k=2,e=8,h=4096,i=14336,w=int4_g32_min | sm_80 | ptx80 | - | moe_sm80
moe | m=64,top_k=2,e=8,h=4096,i=14336,w=int4_g64 | sm_90 | ptx80 | - | moe_sm80
moe | m=64,top_k=2,e=8,h=4096,i=14336,w=int4_g128 | sm_90 | ptx80 | - | moe_sm90
moe | m=16,top_k=6,e=128,h=2688,i=1856,w=int4_g128,activation=relu2,gated=false | sm_86 | ptx80 | - | moe_chain_w_triton
moe | m=16,top_k=8,e=128,h=2048,i=768 | sm_80 | ptx80 | - | moe_chain_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128 | cpu:avx2 | x86 | - | moe_cpu@avx2
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_90 | torch | - | moe_chain_torch
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | h200 | sm90a | - | moe_w8a8_sm90
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_89 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_90 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_100 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_103 | cutedsl89 | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_110 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_120 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_121 | family120 | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | gfx950 | hip | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | gfx1201 | hip | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_86 | cuda | - | moe_chain_torch
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | gfx942 | hip | - | moe_chain_torch
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | gfx1100 | hip | - | moe_chain_torch
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_ch.fp8_token | sm_89 | ptx89 | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_ch.fp8_token | h200 | sm90a | - | moe_w8a8_sm90
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128,epilogue=w13_bias | h200 | sm90a | - | moe_w8a8_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128,codes=true | sm_100 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=6,e=128,h=2688,i=1856,w=fp8.fp8_token,activation=relu2,gated=false | sm_120 | cuda | - | moe_w8a8_triton
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp | cpu:avx2 | x86 | - | moe_cpu@avx2
moe | m=16,top_k=6,e=128,h=2688,i=1856,activation=relu2,gated=false | cpu:avx2 | x86 | - | moe_cpu@avx2
moe | m=16,top_k=6,e=128,h=2688,i=1856,w=int4_g128,activation=relu2,gated=false | h200 | sm90a | - | moe_chain_w_triton
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp | sm_120 | cuda | - | moe_chain_w_triton
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4,epilogue=w13_bias+w2_bias+clamp | h200 | sm90a | - | moe_epilogue_sm90
grouped_linear | m=16,e=32,n=5760,k=2880,w=mxfp4,epilogue=bias+silu_mul+clamp | sm_90 | sm90a | - | grouped_linear_w_triton
process_logits | m=16,v=151936 | sm_80 | cuda | - | process_logits_triton
process_logits | m=16,v=151936,x=fp16 | gfx942 | hip | - | process_logits_triton
process_logits | m=16,v=151936,x=fp32 | cpu:avx2 | x86 | - | process_logits_torch
logprobs | m=16,v=151936,k=20 | sm_80 | cuda | - | logprobs_triton
logprobs | m=16,v=151936,k=65 | sm_80 | cuda | - | logprobs_torch
logprobs | m=16,v=8388609,k=20 | h200 | cuda | - | logprobs_torch
logprobs | m=16,v=151936,k=20,x=fp16 | gfx942 | hip | - | logprobs_triton
logprobs | m=16,v=151936,k=20,x=fp32 | cpu:avx2 | x86 | - | logprobs_torch
sample | m=16,v=128256 | sm_121 | cuda | - | sample_triton
sample | m=16,v=128256 | h200 | sm90a | - | sample_sm90
sample | m=16,v=128256 | h200 | cuda | - | sample_triton
sample | m=16,v=500000 | h200 | sm90a | - | sample_sm90
sample | m=16,v=128256 | cpu:avx2 | x86 | - | sample_cpu@avx2
sample | m=16,v=128256 | gfx1151 | hip | - | sample_triton
# Turing has ldmatrix and mma on fp16, but neither bf16 products nor cp.async, which the tiles of sm_80 are made of: Triton
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_75 | ptx80 | - | linear_w_triton
linear | m=64,n=4096,k=4096,x=fp16,w=int4_g128_zp | sm_75 | ptx80 | - | linear_w_triton
linear | m=16,n=4096,k=4096,x=fp16,w=fp8_ch | sm_75 | ptx80 | - | linear_w_triton
linear | m=1,n=4096,k=4096,x=fp16,w=mxfp4 | sm_75 | ptx80 | - | linear_w_triton
linear | m=64,n=4096,k=4096,x=fp16,w=nvfp4 | sm_75 | ptx80 | - | linear_w_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,x=fp16,w=int4_g128 | sm_75 | ptx80 | - | moe_chain_w_triton
grouped_linear | m=16,e=128,n=1536,k=2048,x=fp16,w=int4_g128 | sm_75 | ptx80 | - | grouped_linear_w_triton
paged_attention | ~paged,x=fp16 | sm_75 | ptx80 | - | paged_attention_triton_split
# with PTX of compute_75 it runs native products: up to 8 rows straight from memory, any number through shared memory
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_75 | ptx75 | - | linear_w4a16_decode_sm75
linear | m=8,n=4096,k=14336,x=fp16,w=int4_g128_zp | sm_75 | ptx75 | - | linear_w4a16_decode_sm75
linear | m=9,n=4096,k=4096,x=fp16,w=int4_g128 | sm_75 | ptx75 | - | linear_w4a16_gemm_sm75
linear | m=16,n=4096,k=4096,x=fp16,w=int8_ch | sm_75 | ptx75 | - | linear_w8a16_gemm_sm75
linear | m=1,n=4096,k=4096,x=fp16,w=fp8_ch | sm_75 | ptx75 | - | linear_w8a16_decode_sm75
linear | m=1,n=4096,k=4096,x=fp16,w=mxfp4 | sm_75 | ptx75 | - | linear_w4a16_decode_sm75
linear | m=64,n=4096,k=4096,x=fp16,w=nvfp4 | sm_75 | ptx75 | - | linear_w4a16_gemm_sm75
linear | m=4,n=4096,k=4096,x=fp16,w=int4_g64,act_order=true | sm_75 | ptx75 | - | linear_w4a16_decode_sm75
linear | m=4096,n=4096,k=4096,x=fp16,w=fp8_block,epilogue=bias+silu_mul | sm_75 | ptx75 | - | linear_w8a16_gemm_sm75
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g32_min | sm_75 | ptx75 | - | linear_gguf_decode_sm75
linear | m=64,n=4096,k=4096,x=fp16,w=int6_g16 | sm_75 | ptx75 | - | linear_gguf_gemm_sm75
grouped_linear | m=16,e=128,n=1536,k=2048,x=fp16,w=int4_g128 | sm_75 | ptx75 | - | grouped_linear_sm75
grouped_linear | m=64,e=8,n=4096,k=2048,x=fp16,w=fp8_block,epilogue=silu_mul,gather=2 | sm_75 | ptx75 | - | grouped_linear_sm75
moe | m=16,top_k=8,e=128,h=2048,i=768,x=fp16,w=int4_g128_zp | sm_75 | ptx75 | - | moe_sm75
moe | m=1,top_k=4,e=32,h=2880,i=2880,x=fp16,w=mxfp4,epilogue=w13_bias+w2_bias+clamp | sm_75 | ptx75 | - | moe_sm75
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_75 | ptx75 | - | moe_chain_w_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,x=fp16,w=int4_g128 | sm_86 | ptx75 | - | moe_sm80
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_75 | ptx75 | - | linear_w_triton
linear | m=64,n=4096,k=4096,x=fp16,w=int8_ch | sm_75 | ptx75-off | - | linear_w_triton
# where those for sm_80 run they come first, and without their library the ones for sm_75 stand in
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_80 | ptx75 | - | linear_w4a16_decode_sm80
linear | m=64,n=4096,k=4096,x=fp16,w=fp8_ch | sm_89 | ptx75 | - | linear_w8a16_gemm_sm80
linear | m=1,n=4096,k=4096,x=fp16,w=mxfp4 | sm_90 | ptx75 | - | linear_w4a16_decode_sm90
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_86 | turing | - | linear_w4a16_decode_sm75
# Volta lacks ldmatrix too; without Triton, weights packed in these tiles are dequantized by torch
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_70 | ptx75 | - | linear_w_triton
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_70 | ptx80 | no-triton | linear_dequant_frag16
# PTX of compute_80 runs on every later architecture, also where no cubin of ours does: data centre, GeForce and Jetson alike
linear | m=1,n=4096,k=4096,w=fp8_ch | sm_103 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=16,n=4096,k=4096,w=int8_ch | sm_100 | ptx80 | - | linear_w8a16_decode_sm80
linear | m=64,n=4096,k=4096,w=mxfp4 | sm_103 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=1,n=4096,k=4096,w=nvfp4 | sm_120 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=64,n=4096,k=4096,w=nvfp4 | sm_121 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=64,n=4096,k=4096,w=int4_g128_zp | sm_121 | ptx80 | - | linear_w4a16_gemm_sm80
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_110 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=16,n=2048,k=4096,w=int4_g128 | sm_87 | ptx80 | - | linear_w4a16_decode_sm80
linear | m=64,n=4096,k=4096,w=fp8_ch | sm_87 | ptx80 | - | linear_w8a16_gemm_sm80
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4 | sm_121 | ptx80 | - | moe_sm80
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_ch | sm_100 | ptx80 | - | moe_sm80
moe | m=64,top_k=8,e=128,h=2048,i=768,w=nvfp4,x=fp16 | sm_103 | ptx80 | - | moe_sm80
paged_attention | ~paged,head_dim=192 | sm_121 | ptx80 | - | paged_attention_sm80_more_split
paged_attention | ~paged,x=fp16,lse=true | sm_100 | ptx80 | - | paged_attention_sm80_split
paged_attention | ~paged,head_dim=80,x=fp16 | sm_103 | ptx80 | - | paged_attention_sm80_more_split
# a tuned or newer schedule of the very architecture is preferred over PTX, whose absence there changes nothing
linear | m=16,n=4096,k=4096,w=fp8_ch | sm_90 | ptx80 | - | linear_w8a16_decode_sm90
linear | m=64,n=4096,k=4096,w=int4_g128_zp | sm_90 | ptx80 | - | linear_w4a16_gemm_ws_sm90
linear | m=1,n=4096,k=4096,w=mxfp4 | sm_90 | ptx | - | linear_w4a16_decode_sm80
paged_attention | ~paged | sm_90 | ptx80 | - | paged_attention_sm90_split
paged_attention | ~paged | sm_90 | ptx | - | paged_attention_sm80_split
# a cubin for sm_80 is no PTX: on sm_80 the tiles are not there, and sm_89 could not load it anyway
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_80 | ampere | - | linear_w_triton
moe | m=1,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_89 | ampere | - | moe_chain_w_triton
# quantized activations are other products: weight-only tiles do not stand in for them
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx80 | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=int8_g128.int8_g128 | sm_80 | ptx80 | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_75 | ptx80 | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_75 | ptx75 | - | linear_w8a8_sm75
linear | m=1,n=4096,k=4096,x=fp16,w=int8_ch.int8_token,codes=true | sm_75 | turing | - | linear_w8a8_sm75
linear | m=300,n=4098,k=1008,w=int8_ch.int8_token,epilogue=bias+silu_mul | sm_75 | turing | invariant | linear_w8a8_sm75
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_86 | ptx75 | - | linear_w8a8_sm80
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_86 | turing | - | linear_w8a8_sm75
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_80 | ampere | - | linear_dequant_torch
linear | m=16,n=4096,k=4100,w=int8_ch.int8_token | sm_80 | ptx80 | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,x=fp32,w=int8_ch.int8_token | sm_86 | ptx80 | - | linear_dequant_torch
# int8 products of both operands, by PTX on every GPU from sm_80 on, also of given codes; Hopper has its own, but for given codes
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_80 | ptx80 | - | linear_w8a8_sm80
linear | m=1,n=4096,k=4096,w=int8_ch.int8_token | sm_86 | ptx80 | - | linear_w8a8_sm80
linear | m=4096,n=14336,k=4096,x=fp16,w=int8_ch.int8_token,epilogue=bias+silu_mul | sm_89 | ptx80 | - | linear_w8a8_sm80
linear | m=257,n=4097,k=1008,w=int8_ch.int8_token,epilogue=bias+residual | sm_120 | ptx80 | - | linear_w8a8_sm80
linear | m=8,n=4096,k=4096,w=int8_ch.int8_token,codes=true | sm_121 | ptx80 | - | linear_w8a8_sm80
linear | m=64,n=4096,k=4096,w=int8_ch.int8_token | sm_100 | ptx80 | - | linear_w8a8_sm80
linear | m=64,n=4096,k=4096,w=int8_ch.int8_token | sm_80 | ptx80 | invariant | linear_w8a8_sm80
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_90 | ptx80 | - | linear_w8a8_sm90
linear | m=4096,n=4096,k=4096,w=int8_ch.int8_token | sm_90 | ptx80 | - | linear_w8a8_sm90
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token,codes=true | sm_90 | ptx80 | - | linear_w8a8_sm80
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_90 | ptx | - | linear_w8a8_sm80
mla_attention | ~mla | sm_80 | ptx80 | - | mla_attention_sm80
mla_attention | ~mla,x=fp16,block_size=7,lse=true | sm_86 | ptx80 | - | mla_attention_sm80
mla_attention | q_tokens=8,seqs=2,max_q=4,max_ctx=64,total_ctx=128,heads=128 | sm_89 | ptx80 | - | mla_attention_sm80
mla_attention | ~mla | sm_120 | ptx80 | - | mla_attention_sm80
mla_attention | ~mla | sm_86 | ptx80 | invariant | mla_attention_sm80_whole
mla_attention | ~mla | sm_90 | ptx80 | - | mla_attention_sm90
mla_attention | ~mla | sm_90 | ptx80 | invariant | mla_attention_sm90_whole
mla_attention | ~mla | sm_90 | ptx | - | mla_attention_sm80
mla_attention | ~mla,latent_dim=256 | sm_89 | ptx80 | - | mla_attention_triton_split
# block-scaled products of both operands, where mma.sync has them and the build has PTX of the family; weight-only products as elsewhere
linear | m=1,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | family120 | - | linear_fp4_sm120
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | family120 | - | linear_fp4_sm120
linear | m=1024,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | family120 | - | linear_fp4_sm120
linear | m=1,n=4096,k=4096,w=mxfp4.mxfp4 | sm_120 | family120 | - | linear_fp4_sm120
linear | m=64,n=4096,k=4096,w=mxfp4.mxfp4 | sm_120 | family120 | - | linear_fp4_sm120
linear | m=1024,n=4096,k=4096,w=mxfp4.mxfp4 | sm_120 | family120 | - | linear_fp4_sm120
linear | m=1,n=4096,k=4096,w=mxfp8.mxfp8 | sm_120 | family120 | - | linear_mxfp8_sm120
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_120 | family120 | - | linear_mxfp8_sm120
linear | m=1024,n=4096,k=4096,w=mxfp8.mxfp8 | sm_120 | family120 | - | linear_mxfp8_sm120
linear | m=1,n=4096,k=4096,w=nvfp4.nvfp4 | sm_121 | family120 | - | linear_fp4_sm120
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_121 | family120 | - | linear_fp4_sm120
linear | m=1024,n=4096,k=4096,w=nvfp4.nvfp4 | sm_121 | family120 | - | linear_fp4_sm120
linear | m=1,n=4096,k=4096,w=mxfp4.mxfp4 | sm_121 | family120 | - | linear_fp4_sm120
linear | m=64,n=4096,k=4096,w=mxfp4.mxfp4 | sm_121 | family120 | - | linear_fp4_sm120
linear | m=1024,n=4096,k=4096,w=mxfp4.mxfp4 | sm_121 | family120 | - | linear_fp4_sm120
linear | m=1,n=4096,k=4096,w=mxfp8.mxfp8 | sm_121 | family120 | - | linear_mxfp8_sm120
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_121 | family120 | - | linear_mxfp8_sm120
linear | m=1024,n=4096,k=4096,w=mxfp8.mxfp8 | sm_121 | family120 | - | linear_mxfp8_sm120
linear | m=7,n=4097,k=14336,x=fp16,w=nvfp4.nvfp4,epilogue=bias+residual | sm_120 | family120 | - | linear_fp4_sm120
linear | m=257,n=28672,k=4096,w=mxfp8.mxfp8,epilogue=bias+silu_mul | sm_121 | family120 | - | linear_mxfp8_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_120 | family120 | - | moe_fp4_sm120
moe | m=64,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_120 | family120 | - | moe_fp4_sm120
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_120 | family120 | - | moe_fp4_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_120 | family120 | - | moe_fp4_sm120
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_120 | family120 | - | moe_fp4_sm120
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_120 | family120 | - | moe_fp4_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_120 | family120 | - | moe_mxfp8_sm120
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_120 | family120 | - | moe_mxfp8_sm120
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_120 | family120 | - | moe_mxfp8_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_121 | family120 | - | moe_fp4_sm120
moe | m=64,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_121 | family120 | - | moe_fp4_sm120
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_121 | family120 | - | moe_fp4_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_121 | family120 | - | moe_fp4_sm120
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_121 | family120 | - | moe_fp4_sm120
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_121 | family120 | - | moe_fp4_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_121 | family120 | - | moe_mxfp8_sm120
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_121 | family120 | - | moe_mxfp8_sm120
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_121 | family120 | - | moe_mxfp8_sm120
moe | m=16,top_k=4,e=32,h=2944,i=2944,x=fp16,w=mxfp4.mxfp4,epilogue=w13_bias+w2_bias+clamp | sm_120 | family120 | - | moe_fp4_sm120
moe | m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp4 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=64,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=1024,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8,e=128,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=8192,e=64,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_103 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_120 | family120 | - | grouped_linear_fp4_sm120
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_120 | family120 | - | grouped_linear_fp4_sm120
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_120 | family120 | - | grouped_linear_mxfp8_sm120
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_121 | family120 | - | grouped_linear_fp4_sm120
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp4,epilogue=silu_mul,gather=8 | sm_121 | family120 | - | grouped_linear_fp4_sm120
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_121 | family120 | - | grouped_linear_mxfp8_sm120
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_110 | cutedsl | - | grouped_linear_nvfp4_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp8.mxfp8,epilogue=silu_mul,gather=8 | sm_110 | cutedsl | - | grouped_linear_mx_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_120 | cutedsl | - | grouped_linear_nvfp4_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=mxfp4.mxfp8,epilogue=silu_mul,gather=8 | sm_121 | family120 | - | grouped_linear_mx_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_100 | cutedsl-old | - | grouped_linear_nvfp4_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul,gather=8 | sm_90 | cutedsl | - | grouped_linear_torch
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_89 | ptx89 | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_90 | cutedsl | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_100 | cutedsl89 | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_103 | cuda | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_110 | cuda | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_120 | cuda | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | sm_121 | cuda | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | gfx950 | hip | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | gfx1201 | hip | - | grouped_linear_w8a8_triton
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,epilogue=silu_mul,gather=8 | gfx942 | hip | - | grouped_linear_torch
grouped_linear | m=512,e=128,n=1536,k=2048,w=fp8_block.fp8_g128,x=fp32 | sm_90 | cuda | - | grouped_linear_torch
grouped_linear | m=512,e=128,n=1408,k=2048,w=nvfp4.nvfp4,epilogue=silu_mul | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100
grouped_linear | m=512,e=128,n=1408,k=2064,w=nvfp4.nvfp4,epilogue=silu_mul | sm_100 | cutedsl | - | grouped_linear_nvfp4_triton
moe | m=4096,top_k=8,e=256,h=7168,i=2048,x=fp16,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=16,top_k=4,e=32,h=2944,i=2944,w=mxfp4.mxfp8,epilogue=w13_bias+w2_bias+clamp | sm_103 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4.mxfp8,epilogue=w13_bias+w2_bias+clamp | sm_100 | cutedsl | - | moe_mx_triton
moe | m=16,top_k=8,e=128,h=2048,i=704,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100
moe | m=16,top_k=8,e=128,h=2048,i=720,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | moe_nvfp4_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4,x=fp32 | sm_100 | cutedsl | - | moe_nvfp4_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_100 | cutedsl-old | - | moe_nvfp4_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_103 | family120 | - | moe_mx_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_110 | cutedsl | - | moe_nvfp4_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_110 | cutedsl | - | moe_mx_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_120 | cutedsl | - | moe_nvfp4_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=mxfp4.mxfp8 | sm_121 | cutedsl | - | moe_mx_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_110 | family120 | - | moe_nvfp4_triton
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_120 | ptx80 | - | moe_nvfp4_triton
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4.mxfp8,epilogue=w13_bias+w2_bias+clamp | sm_121 | family120 | - | moe_mx_triton
moe | m=16,top_k=4,e=32,h=2880,i=2880,w=mxfp4.mxfp4 | sm_120 | family120 | - | moe_mx_triton
moe | m=16,top_k=4,e=32,h=2048,i=768,w=mxfp8.mxfp8,activation=relu2,gated=false | sm_120 | family120 | - | moe_chain_torch
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_90 | family120 | - | moe_chain_torch
linear | m=16,n=4096,k=4096,w=nvfp4 | sm_120 | family120 | - | linear_w4a16_decode_sm80
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | ptx80 | - | linear_nvfp4_triton
linear | m=64,n=4096,k=4096,w=mxfp4.mxfp8 | sm_120 | family120 | - | linear_mx_triton
linear | m=64,n=4096,k=4128,w=mxfp8.mxfp8 | sm_120 | family120 | - | linear_mx_triton
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_110 | family120 | - | linear_nvfp4_triton
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_100 | family120 | - | linear_nvfp4_triton
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_90 | family120 | - | linear_dequant_torch
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_89 | family120 | - | linear_dequant_torch
# e4m3 products of both operands, by PTX of a library of its own, on every GPU from sm_89 on; Hopper has its own
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx89 | - | linear_w8a8_sm89
linear | m=1,n=4096,k=4096,w=fp8.fp8_token | sm_120 | ptx89 | - | linear_w8a8_sm89
linear | m=4096,n=14336,k=4096,x=fp16,w=fp8.fp8,epilogue=bias+silu_mul | sm_121 | ptx89 | - | linear_w8a8_sm89
linear | m=257,n=4097,k=1008,w=fp8_block.fp8_g128,epilogue=bias+residual | sm_89 | ptx89 | - | linear_w8a8_sm89
linear | m=8,n=4096,k=4096,w=fp8_block.fp8_g128,codes=true | sm_120 | ptx89 | - | linear_w8a8_sm89
linear | m=64,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_100 | ptx89 | - | linear_w8a8_sm89
linear | m=64,n=4096,k=4096,w=fp8_ch.fp8,codes=true | sm_103 | ptx89 | - | linear_w8a8_sm89
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_89 | ptx89 | - | linear_w8a8_sm80
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_90 | ptx89 | - | linear_w8a8_sm90
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | ptx89 | - | linear_w8a8_sm90
linear | m=16,n=4096,k=4096,w=fp8.fp8 | sm_90 | ptx89 | - | linear_w8a8_tensor_sm90
linear | m=4096,n=4096,k=4096,x=fp16,w=fp8_ch.fp8,epilogue=bias,codes=true | h200 | sm90a | - | linear_w8a8_tensor_sm90
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_86 | ptx89 | - | linear_dequant_torch
linear | m=16,n=4096,k=4100,w=fp8_ch.fp8_token | sm_89 | ptx89 | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,x=fp32,w=fp8_ch.fp8_token | sm_89 | ptx89 | - | linear_dequant_torch
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_g128 | sm_89 | ptx89 | - | linear_dequant_torch
# other families have Triton alone before Hopper
mla_attention | ~mla,x=fp16 | sm_75 | ptx80 | - | mla_attention_triton_split
varlen_attention | ~varlen | sm_89 | ptx80 | - | varlen_attention_triton
varlen_attention | ~varlen,x=fp16 | sm_121 | ptx80 | - | varlen_attention_triton
# results that depend on the batch are out under batch invariance, however fast
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_80 | ptx80 | invariant | linear_w_invariant_triton
moe | m=1,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_86 | ptx80 | invariant | moe_chain_w_invariant_triton
"""

REFUSED = """
# older and newer NVIDIA GPUs: what the hardware, the build, the problem or the policy lacks
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_70 | ptx80 | - | linear_w4a16_decode_sm80 | hardware | lacks cp_async, ldmatrix, mma.bf16
linear | m=64,n=4096,k=4096,w=nvfp4 | sm_75 | ptx80 | - | linear_w4a16_gemm_sm80 | hardware | sm_75 lacks cp_async, mma.bf16
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_75 | ptx80 | - | moe_sm80 | hardware | sm_75 lacks cp_async, mma.bf16
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_80 | ampere | - | linear_w4a16_decode_sm80 | build | no code for compute_80; it has sm_80
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128 | sm_89 | sm90a | - | moe_sm80 | build | no code for compute_80
moe | m=16,top_k=8,e=128,h=2048,i=768,w=int4_g128,x=fp32 | sm_86 | ptx80 | - | moe_sm80 | problem | takes fp16 or bf16
moe | m=16,top_k=8,e=128,h=2048,i=768 | sm_121 | ptx80 | - | moe_sm80 | problem | weight-only formats
linear | m=1,n=4096,k=4096,w=int8_ch.int8_token | sm_80 | ptx80 | - | linear_w8a16_decode_sm80 | problem | weight-only
linear | m=16,n=4096,k=4096 | sm_86 | ptx80 | - | linear_w8a16_gemm_sm80 | problem | not bf16
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_75 | ptx80 | - | linear_w8a8_sm80 | hardware | sm_75 lacks cp_async
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | gfx942 | ptx80 | - | linear_w8a8_sm80 | hardware | runs on nvidia
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_70 | turing | - | linear_w8a8_sm75 | hardware | sm_70 lacks ldmatrix
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_75 | ptx75-off | - | linear_w8a8_sm75 | build | not in this build: compute_75
linear | m=16,n=4100,k=4100,w=int8_ch.int8_token | sm_75 | turing | - | linear_w8a8_sm75 | problem | K a multiple of 16
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_80 | ampere | - | linear_w8a8_sm80 | build | no code for compute_80; it has sm_80
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_89 | sm90a | - | linear_w8a8_sm80 | build | no code for compute_80
linear | m=16,n=4096,k=4096,w=int8_ch | sm_80 | ptx80 | - | linear_w8a8_sm80 | problem | not int8_ch
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx80 | - | linear_w8a8_sm80 | problem | not fp8_ch.fp8_token
linear | m=16,n=4096,k=4096,w=int8_g128.int8_g128 | sm_120 | ptx80 | - | linear_w8a8_sm80 | problem | not int8_g128.int8_g128
linear | m=16,n=4096,k=4100,w=int8_ch.int8_token | sm_80 | ptx80 | - | linear_w8a8_sm80 | problem | K a multiple of 16
linear | m=16,n=4096,k=4096,x=fp32,w=int8_ch.int8_token | sm_86 | ptx80 | - | linear_w8a8_sm80 | problem | takes fp16 or bf16
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token,codes=true | sm_90 | ptx80 | - | linear_w8a8_sm90 | problem | needs the sums of int8 codes
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_110 | family120 | - | linear_fp4_sm120 | hardware | sm_110 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_110 | family120 | - | linear_mxfp8_sm120 | hardware | sm_110 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_103 | family120 | - | linear_fp4_sm120 | hardware | sm_103 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_103 | family120 | - | linear_mxfp8_sm120 | hardware | sm_103 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_100 | family120 | - | linear_fp4_sm120 | hardware | sm_100 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_100 | family120 | - | linear_mxfp8_sm120 | hardware | sm_100 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_90 | family120 | - | linear_fp4_sm120 | hardware | sm_90 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_90 | family120 | - | linear_mxfp8_sm120 | hardware | sm_90 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_89 | family120 | - | linear_fp4_sm120 | hardware | sm_89 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_89 | family120 | - | linear_mxfp8_sm120 | hardware | sm_89 lacks mma.sync.block_scale
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | gfx950 | family120 | - | linear_fp4_sm120 | hardware | runs on nvidia
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | ptx80 | - | linear_fp4_sm120 | build | no code for compute_120f
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_121 | blackwell | - | linear_mxfp8_sm120 | build | no code for compute_120f
linear | m=64,n=4096,k=4096,w=mxfp4.mxfp8 | sm_120 | family120 | - | linear_mxfp8_sm120 | problem | not mxfp4.mxfp8
linear | m=64,n=4096,k=4096,w=nvfp4 | sm_120 | family120 | - | linear_fp4_sm120 | problem | not nvfp4
linear | m=64,n=4096,k=4160,w=mxfp4.mxfp4 | sm_121 | family120 | - | linear_fp4_sm120 | problem | K a multiple of 128
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | family120 | invariant | linear_fp4_sm120 | policy | results depend on the batch
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_86 | ptx89 | - | linear_w8a8_sm89 | hardware | sm_86 lacks mma.fp8
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx942 | ptx89 | - | linear_w8a8_sm89 | hardware | runs on nvidia
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx80 | - | linear_w8a8_sm89 | build | not in this build: compute_89
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx | - | linear_w8a8_sm89 | build | no code for compute_89; it has compute_80
linear | m=16,n=4096,k=4096,w=fp8_ch | sm_89 | ptx89 | - | linear_w8a8_sm89 | problem | not fp8_ch
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_token | sm_89 | ptx89 | - | linear_w8a8_sm89 | problem | not fp8_block.fp8_token
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | sm_89 | ptx89 | - | linear_w8a8_sm89 | problem | not int8_ch.int8_token
linear | m=16,n=4096,k=65552,w=fp8.fp8 | sm_120 | ptx89 | - | linear_w8a8_sm89 | problem | at most 65536
linear | m=16,n=4096,k=4096,x=fp32,w=fp8_block.fp8_g128 | sm_89 | ptx89 | - | linear_w8a8_sm89 | problem | takes fp16 or bf16
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx89 | invariant | linear_w8a8_sm89 | policy | results depend on the batch
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_80 | ptx80 | invariant | linear_w4a16_decode_sm80 | policy | results depend on the batch
paged_attention | ~paged,head_dim=112 | sm_89 | ptx80 | - | paged_attention_sm80_split | problem | not 112
paged_attention | ~paged | gfx942 | ptx80 | - | paged_attention_sm80_split | hardware | runs on nvidia
paged_attention | ~paged | sm_80 | ptx80 | invariant | paged_attention_sm80_split | policy | results depend on the batch
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_100 | ptx80 | - | linear_w4a16_decode_sm90 | hardware | sm_100 lacks wgmma
paged_attention | ~paged | sm_120 | ptx80 | - | paged_attention_sm90_split | hardware | sm_120 lacks wgmma
# skinny products in HIP
linear | m=1,n=4096,k=4096 | sm_90 | wave | - | linear_wv_splitk_hip | hardware | runs on amd; sm_90 is nvidia
linear | m=1,n=4096,k=4096 | cpu:avx2 | wave | - | linear_wv_splitk_hip | hardware | runs on amd; cpu:avx2 is cpu
linear | m=1,n=4096,k=4096 | gfx1030 | wave | - | linear_wv_splitk_hip | hardware | none of it runs on gfx1030
linear | m=1,n=4096,k=4096 | gfx906 | wave | - | linear_wv_splitk_hip | hardware | none of it runs on gfx906
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx1250 | wave | - | linear_w_wv_splitk_hip | hardware | none of it runs on gfx1250
linear | m=1,n=4096,k=4096 | gfx1100 | hip | - | linear_wv_splitk_hip | build | no HIP architecture that runs on gfx1100; it has none
linear | m=1,n=4096,k=4096 | gfx1100 | wave-942 | - | linear_wv_splitk_hip | build | no HIP architecture that runs on gfx1100; it has gfx942
linear | m=9,n=4096,k=4096 | gfx1100 | wave | - | linear_wv_splitk_hip | problem | made for M <= 8, not 9
linear | m=64,n=4096,k=4096,w=int4_g128 | gfx942 | wave | - | linear_w_wv_splitk_hip | problem | made for M <= 8, not 64
linear | m=1,n=4096,k=4100 | gfx1100 | wave | - | linear_wv_splitk_hip | problem | needs K a multiple of 8, got K=4100
linear | m=1,n=4096,k=4112,w=int4_ch | gfx1100 | wave | - | linear_w_wv_splitk_hip | problem | needs K a multiple of 32, got K=4112
linear | m=1,n=4096,k=4104,w=int8_ch | gfx1100 | wave | - | linear_w_wv_splitk_hip | problem | needs K a multiple of 16, got K=4104
linear | m=1,n=4096,k=4096,x=fp32,w=fp32 | gfx1100 | wave | - | linear_wv_splitk_hip | problem | takes fp16 or bf16 activations, not fp32
linear | m=1,n=4096,k=4096,x=bf16,w=fp16 | gfx1100 | wave | - | linear_wv_splitk_hip | problem | in the dtype of x, not fp16
linear | m=1,n=4096,k=4096,w=nvfp4 | gfx942 | wave | - | linear_w_wv_splitk_hip | problem | 4- or 8-bit integers, not nvfp4
linear | m=1,n=4096,k=4096,w=int8_ch.int8_token | gfx942 | wave | - | linear_w_wv_splitk_hip | problem | not int8_ch.int8_token
linear | m=1,n=4096,k=4096,w=int4_g64,act_order=true | gfx1100 | wave | - | linear_w_wv_splitk_hip | problem | takes no act-order
linear | m=1,n=4096,k=4096 | gfx1100 | wave | invariant | linear_wv_splitk_hip | policy | results depend on the batch
# the device
rms_norm | m=1,n=4096 | sm_90 | x86 | - | rms_norm_cpu | hardware | runs on cpu; sm_90 is nvidia
rms_norm | m=1,n=4096 | gfx942 | x86 | - | rms_norm_cpu | hardware | runs on cpu; gfx942 is amd
rms_norm | m=1,n=4096 | xpu:bmg | x86 | - | rms_norm_cpu | hardware | runs on cpu; xpu:bmg is intel
rms_norm | m=1,n=4096 | gfx1030 | hip | - | rms_norm_triton | hardware | Triton emits no code for gfx1030
rms_norm | m=1,n=4096 | cpu:avx2 | x86 | - | rms_norm_triton | hardware | its interpreter is off
rms_norm | m=1,n=4096 | gfx942 | flashinfer | flashinfer | rms_norm_flashinfer | hardware | runs on nvidia; gfx942 is amd
rms_norm | m=1,n=4096 | cpu:avx2 | flashinfer | flashinfer | rms_norm_flashinfer | hardware | runs on nvidia; cpu:avx2 is cpu
rms_norm | m=1,n=4096 | sm_90 | aiter | aiter | rms_norm_aiter | hardware | runs on amd; sm_90 is nvidia
rms_norm | m=1,n=4096 | gfx1100 | aiter | aiter | rms_norm_aiter | hardware | gfx1100 lacks mfma
rms_norm | m=1,n=4096 | gfx1201 | aiter | aiter | rms_norm_aiter | hardware | gfx1201 lacks mfma
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_89 | deepgemm | deepgemm | linear_deepgemm | hardware | sm_89 lacks tma, wgmma
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_100 | deepgemm | deepgemm | linear_deepgemm | hardware | sm_100 lacks wgmma
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_103 | deepgemm | deepgemm | linear_deepgemm | hardware | sm_103 lacks wgmma
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_120 | deepgemm | deepgemm | linear_deepgemm | hardware | sm_120 lacks wgmma
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_121 | deepgemm | deepgemm | linear_deepgemm | hardware | sm_121 lacks wgmma
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_110 | deepgemm | deepgemm | linear_deepgemm | hardware | sm_110 lacks wgmma
linear | m=16,n=4096,k=4096,w=int4_g128 | gfx942 | humming | humming | linear_humming | hardware | runs on nvidia; gfx942 is amd
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_120 | sm90a | - | linear_w4a16_decode_sm90 | hardware | sm_120 lacks wgmma
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_75 | ptx80 | - | linear_w4a16_decode_sm80 | hardware | lacks cp_async
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_86 | sm90a | - | linear_w4a16_decode_sm80 | build | no code for compute_80
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_75 | ptx75 | - | linear_w4a16_decode_sm75 | problem | takes fp16 activations alone
linear | m=64,n=4096,k=4096,w=fp8_ch | sm_75 | ptx75 | - | linear_w8a16_gemm_sm75 | problem | tensor cores do, not bf16
linear | m=64,n=4096,k=4096,x=fp32,w=int6_g16 | sm_75 | ptx75 | - | linear_gguf_gemm_sm75 | problem | not fp32
linear | m=9,n=4096,k=4096,x=fp16,w=int4_g128 | sm_75 | ptx75 | - | linear_w4a16_decode_sm75 | problem | made for M <= 8, not 9
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_75 | ptx75-off | - | linear_w4a16_decode_sm75 | build | not in this build: compute_75 (rare
linear | m=1,n=4096,k=4096,x=fp16,w=int8_ch | sm_75 | ptx80 | - | linear_w8a16_decode_sm75 | build | no code for compute_75
grouped_linear | m=16,e=128,n=1536,k=2048,w=int4_g128 | sm_75 | ptx75 | - | grouped_linear_sm75 | problem | takes fp16 activations alone
grouped_linear | m=16,e=4,n=1536,k=2048,x=fp16,w=int4_g128,act_order=true | sm_75 | ptx75 | - | grouped_linear_sm75 | problem | act-order
grouped_linear | m=16,e=8,n=1536,k=2048,x=fp16,w=int4_g128 | sm_75 | ptx75-off | - | grouped_linear_sm75 | build | not in this build: compute_75
moe | m=16,top_k=8,e=128,h=2048,i=768,x=fp16,w=int4_g128 | sm_75 | ptx80 | - | moe_sm75 | build | no code for compute_75
moe | m=16,top_k=8,e=128,h=2048,i=768,x=fp16,w=int4_g128 | sm_70 | ptx75 | - | moe_sm75 | hardware | sm_70 lacks ldmatrix
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_70 | ptx75 | - | linear_w4a16_decode_sm75 | hardware | sm_70 lacks ldmatrix
linear | m=64,n=4096,k=4096,x=fp16,w=nvfp4 | gfx942 | ptx75 | - | linear_w4a16_gemm_sm75 | hardware | runs on nvidia
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g64.int8_g32 | sm_75 | ptx75 | - | linear_w4a16_decode_sm75 | problem | weight-only
linear | m=1,n=4096,k=4096,x=fp16,w=int4_g128 | sm_75 | ptx75 | - | linear_w4a16_decode_sm80 | hardware | lacks cp_async
linear | m=17,n=4096,k=4096,w=int4_g128 | sm_86 | ptx80 | - | linear_w4a16_decode_sm80 | problem | made for M <= 16, not 17
linear | m=1,n=4096,k=4096,x=fp32,w=int4_g128 | sm_89 | ptx80 | - | linear_w4a16_decode_sm80 | problem | takes fp16 or bf16
linear | m=1,n=4096,k=4096,w=int4_g128 | gfx942 | ptx80 | - | linear_w4a16_decode_sm80 | hardware | runs on nvidia
linear | m=64,n=4096,k=4096,w=int4_g128 | sm_75 | ptx80 | - | linear_w4a16_gemm_sm80 | hardware | lacks cp_async
linear | m=64,n=4096,k=4096,w=int4_g128 | sm_89 | cuda | - | linear_w4a16_gemm_sm80 | build | no code for compute_80
linear | m=64,n=4096,k=4096,x=fp32,w=int4_g128 | sm_80 | ptx80 | - | linear_w4a16_gemm_sm80 | problem | takes fp16 or bf16
linear | m=1,n=4096,k=4096,w=nvfp4 | sm_75 | ptx80 | - | linear_w4a16_decode_sm80 | hardware | lacks cp_async
linear | m=1,n=4096,k=4096,w=fp8_ch | sm_75 | ptx80 | - | linear_w8a16_decode_sm80 | hardware | lacks cp_async
linear | m=17,n=4096,k=4096,w=int8_ch | sm_80 | ptx80 | - | linear_w8a16_decode_sm80 | problem | made for M <= 16, not 17
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_80 | ptx80 | - | linear_w8a16_decode_sm80 | problem | formats of 8 bits, not int4_g128
linear | m=1,n=4096,k=4096,w=fp8_ch | sm_86 | ptx80 | - | linear_w4a16_decode_sm80 | problem | formats of 4 bits, not fp8_ch
linear | m=64,n=4096,k=4096,w=fp8_ch.fp8_token | sm_89 | ptx80 | - | linear_w8a16_gemm_sm80 | problem | weight-only
grouped_linear | m=16,e=128,n=1536,k=2048,w=int4_g128 | sm_75 | ptx80 | - | grouped_linear_sm80 | hardware | lacks cp_async
grouped_linear | m=16,e=128,n=1536,k=2048,w=int4_g128 | sm_86 | sm90a | - | grouped_linear_sm80 | build | no code for compute_80
grouped_linear | m=16,e=128,n=1536,k=2048 | sm_80 | ptx80 | - | grouped_linear_sm80 | problem | weight-only formats
grouped_linear | m=16,e=128,n=1536,k=2048 | sm_110 | cutedsl | - | grouped_linear_cutedsl_sm100 | hardware | runs only on its family
grouped_linear | m=16,e=128,n=1536,k=2048 | sm_120 | cutedsl | - | grouped_linear_cutedsl_sm100 | hardware | lacks tcgen05
grouped_linear | m=16,e=128,n=1536,k=2048 | sm_100 | cutedsl | - | grouped_linear_cutedsl_sm90 | hardware | lacks wgmma
grouped_linear | m=16,e=128,n=1536,k=2048 | sm_90 | cutedsl-old | - | grouped_linear_cutedsl_sm90 | build | 4.8 or newer is needed
grouped_linear | m=16,e=128,n=1536,k=2044 | sm_90 | cutedsl | - | grouped_linear_cutedsl_sm90 | problem | multiples of 8
linear | m=1024,n=4096,k=4096 | sm_90 | cutedsl | - | linear_cutedsl_sm100 | hardware | lacks tcgen05
linear | m=1024,n=4096,k=4096 | sm_110 | cutedsl | - | linear_cutedsl_sm100 | hardware | runs only on its family
linear | m=1024,n=4096,k=4096 | sm_120 | cutedsl | - | linear_cutedsl_sm100 | hardware | lacks tcgen05
linear | m=1024,n=4096,k=4096 | sm_121 | cutedsl | - | linear_cutedsl_sm100 | hardware | lacks tcgen05
linear | m=1024,n=4096,k=4096 | gfx950 | cutedsl | - | linear_cutedsl_sm100 | hardware | runs on nvidia
linear | m=1024,n=4096,k=4096 | sm_100 | blackwell | - | linear_cutedsl_sm100 | build | 4.8 or newer is needed
linear | m=1024,n=4096,k=4096 | sm_100 | cuda | - | linear_cutedsl_sm100 | build | nvidia-cutlass-dsl is not installed
linear | m=1024,n=4096,k=4100 | sm_100 | cutedsl | - | linear_cutedsl_sm100 | problem | multiples of 8
linear | m=1024,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_100 | cutedsl | - | linear_fp8_cutedsl_sm100 | build | no code for compute_89
linear | m=1024,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | cutedsl89 | - | linear_fp8_cutedsl_sm100 | hardware | lacks tcgen05
linear | m=1024,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_110 | cutedsl89 | - | linear_fp8_cutedsl_sm100 | hardware | runs only on its family
linear | m=1024,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_120 | cutedsl89 | - | linear_fp8_cutedsl_sm100 | hardware | lacks tcgen05
linear | m=1024,n=4096,k=4096,w=fp8.fp8 | sm_100 | cutedsl89 | - | linear_fp8_cutedsl_sm100 | problem | not fp8.fp8
linear | m=1024,n=4096,k=4096,w=int8_ch.int8_token | sm_100 | cutedsl89 | - | linear_fp8_cutedsl_sm100 | problem | not int8_ch.int8_token
moe | m=5,top_k=8,e=128,h=2048,i=768 | sm_80 | cuda | - | moe_few_tokens_triton | problem | at most 32 entries
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_110 | cutedsl | - | linear_block_scaled_cutedsl_sm100 | hardware | runs only on its family
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_120 | cutedsl | - | linear_block_scaled_cutedsl_sm100 | hardware | lacks tcgen05
linear | m=64,n=4096,k=4096,w=mxfp8.mxfp8 | sm_90 | cutedsl | - | linear_block_scaled_cutedsl_sm100 | hardware | lacks mma.block_scale, tcgen05
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_100 | cutedsl-old | - | linear_block_scaled_cutedsl_sm100 | build | 4.8 or newer is needed
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4 | sm_100 | family120 | - | linear_block_scaled_cutedsl_sm100 | build | nvidia-cutlass-dsl
linear | m=64,n=4096,k=4096,w=nvfp4 | sm_100 | cutedsl | - | linear_block_scaled_cutedsl_sm100 | problem | not nvfp4
linear | m=64,n=4096,k=4096,w=nvfp4.nvfp4,x=fp32 | sm_103 | cutedsl | - | linear_block_scaled_cutedsl_sm100 | problem | fp16 or bf16
grouped_linear | m=16,e=4,n=64,k=128,w=nvfp4.nvfp4 | sm_110 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100 | hardware | its family
grouped_linear | m=16,e=4,n=64,k=128,w=nvfp4.nvfp4 | sm_121 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100 | hardware | lacks tcgen05
grouped_linear | m=16,e=4,n=64,k=208,w=nvfp4.nvfp4 | sm_100 | cutedsl | - | grouped_linear_block_scaled_cutedsl_sm100 | problem | K a multiple of 32
grouped_linear | m=16,e=4,n=64,k=192,w=nvfp4.nvfp4 | sm_120 | family120 | - | grouped_linear_fp4_sm120 | problem | K a multiple of 128
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_110 | cutedsl | - | moe_block_scaled_cutedsl_sm100 | hardware | runs only on its family
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_120 | cutedsl | - | moe_block_scaled_cutedsl_sm100 | hardware | lacks tcgen05
moe | m=16,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_121 | cutedsl | - | moe_block_scaled_cutedsl_sm100 | hardware | lacks tcgen05
moe | m=16,top_k=8,e=128,h=2048,i=768,w=mxfp8.mxfp8 | sm_90 | cutedsl | - | moe_block_scaled_cutedsl_sm100 | hardware | lacks mma.block_scale, tcgen05
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4.nvfp4 | sm_100 | cutedsl-old | - | moe_block_scaled_cutedsl_sm100 | build | 4.8 or newer is needed
moe | m=16,top_k=8,e=128,h=2048,i=768,w=nvfp4 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100 | problem | not nvfp4
moe | m=16,top_k=8,e=128,h=2048,i=704,w=mxfp4.mxfp8 | sm_100 | cutedsl | - | moe_block_scaled_cutedsl_sm100 | problem | K a multiple of 128
grouped_linear | m=16,e=128,n=1536,k=2048,w=int4_g128,x=fp32 | sm_80 | ptx80 | - | grouped_linear_sm80 | problem | takes fp16 or bf16
grouped_linear | m=16,e=4,n=1536,k=2048,w=int4_g128,act_order=true | sm_80 | ptx80 | - | grouped_linear_sm80 | problem | act-order
grouped_linear | m=16,e=4,n=1520,k=2048,w=int4_g128,epilogue=silu_mul | sm_89 | ptx80 | - | grouped_linear_sm80 | problem | whole tiles of 16 rows
moe | m=16,top_k=8,e=2000,h=2048,i=768,w=int4_g128 | sm_80 | ptx80 | - | moe_sm80 | problem | 1024 experts
moe | m=16,top_k=8,e=128,h=2048,i=768,w=fp8_block.fp8_g128 | sm_89 | ptx80 | - | moe_sm80 | problem | weight-only formats
moe | m=16,top_k=2,e=8,h=2048,i=768,w=int4_g128 | gfx942 | ptx80 | - | moe_sm80 | hardware | runs on nvidia
moe | m=16,top_k=2,e=8,h=2044,i=768,w=int4_ch | sm_86 | ptx80 | - | moe_sm80 | problem | not a multiple of 8
mla_attention | ~mla | sm_75 | ptx80 | - | mla_attention_sm80 | hardware | lacks cp_async
mla_attention | ~mla | gfx942 | ptx80 | - | mla_attention_sm80 | hardware | runs on nvidia
mla_attention | ~mla | sm_86 | sm90a | - | mla_attention_sm80 | build | no code for compute_80
mla_attention | ~mla,x=fp32 | sm_80 | ptx80 | - | mla_attention_sm80 | problem | fp16 or bf16
mla_attention | ~mla,rope_dim=32 | sm_120 | ptx80 | - | mla_attention_sm80_whole | problem | not 512 and 32
mla_attention | ~mla | sm_80 | ptx80 | invariant | mla_attention_sm80 | policy | results depend on the batch
paged_attention | ~paged | sm_75 | ptx80 | - | paged_attention_sm80_split | hardware | lacks cp_async
paged_attention | ~paged | sm_86 | sm90a | - | paged_attention_sm80_split | build | no code for compute_80
paged_attention | ~paged,x=fp32 | sm_80 | ptx80 | - | paged_attention_sm80_split | problem | fp16 or bf16
paged_attention | ~wide_group,kv=fp8,kv_scale=head | sm_89 | ptx80 | - | paged_attention_sm80_split | problem | 9 query heads
paged_attention | ~prompts | sm_80 | ptx80 | - | paged_attention_sm80_more_split | problem | not 128
paged_attention | ~prompts,head_dim=112,kv=fp8,kv_scale=head | sm_89 | ptx80 | - | paged_attention_sm80_more_split | problem | not 112
paged_attention | ~prompts,head_dim=96,x=fp32 | sm_86 | ptx80 | - | paged_attention_sm80_more_split | problem | fp16 or bf16
paged_attention | ~prompts,head_dim=96 | sm_75 | ptx80 | - | paged_attention_sm80_more_split | hardware | lacks cp_async
paged_attention | ~prompts,head_dim=96 | sm_86 | sm90a | - | paged_attention_sm80_more_split | build | no code for compute_80
paged_attention | ~prompts,head_dim=96 | sm_80 | ptx80 | invariant | paged_attention_sm80_more_split | policy | results depend on the batch
linear | m=1,n=4096,k=4096,w=int4_g32_min | sm_75 | ptx80 | - | linear_gguf_decode_sm80 | hardware | lacks cp_async
linear | m=64,n=4096,k=4096,w=int6_g16 | gfx942 | ptx80 | - | linear_gguf_gemm_sm80 | hardware | runs on nvidia
linear | m=1,n=4096,k=4096,w=int4_g32_min | sm_86 | sm90a | - | linear_gguf_decode_sm80 | build | no code for compute_80
linear | m=17,n=4096,k=4096,w=int5_g32 | sm_80 | ptx80 | - | linear_gguf_decode_sm80 | problem | made for M <= 16, not 17
linear | m=1,n=4096,k=4096,x=fp32,w=int4_g32_min | sm_89 | ptx80 | - | linear_gguf_decode_sm80 | problem | takes fp16 or bf16
linear | m=64,n=4096,k=4096,w=int4_g32_min | sm_86 | ptx80 | - | linear_w4a16_gemm_sm80 | problem | formats of 4 bits, not int4_g32_min
linear | m=1,n=4096,k=4096,w=int2_g16_min | sm_80 | ptx80 | - | linear_gguf_decode_sm80 | problem | GGUF's formats, not int2_g16_min
linear | m=1,n=4096,k=4096,w=int6_g16.int8_g32 | sm_86 | ptx80 | - | linear_gguf_decode_sm80 | problem | weight-only
linear | m=64,n=4096,k=4096,w=fp8_block | sm_89 | sm90a | - | linear_w8a16_gemm_sm80 | build | no code for compute_80
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | cuda | - | linear_w4a16_gemm_ws_sm90 | build | no code for sm_90a
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_70 | humming | humming | linear_humming | hardware | sm_70 lacks mma.bf16
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_75 | humming | humming | linear_humming | hardware | sm_75 lacks mma.bf16
rms_norm | m=1,n=4096 | sm_70 | flashinfer | flashinfer | rms_norm_flashinfer | hardware | sm_70 lacks ldmatrix
mla_attention | ~mla | sm_75 | flashinfer | flashinfer | mla_attention_flashinfer | hardware | sm_75 lacks cp_async
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx90a | aiter | aiter | linear_aiter | hardware | gfx90a lacks mfma.fp8
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx1100 | aiter | aiter | linear_aiter | hardware | gfx1100 lacks mfma.fp8
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | sm_90 | aiter | aiter | linear_aiter | hardware | runs on amd; sm_90 is nvidia
linear | m=16,n=4096,k=4096 | gfx1030 | both | - | linear_triton | hardware | Triton emits no code for gfx1030
# the installation
rms_norm | m=1,n=4096 | sm_90 | none | - | rms_norm_torch | build | package torch is not installed
rms_norm | m=1,n=4096 | sm_90 | torch-old | - | rms_norm_torch | build | torch is 2.10.1; 2.11 or newer is needed
rms_norm | m=1,n=4096 | sm_90 | torch | - | rms_norm_triton | build | package triton is not installed
rms_norm | m=1,n=4096 | gfx942 | cuda | - | rms_norm_triton | build | no backend hip for gfx942; it has cuda
rms_norm | m=1,n=4096 | sm_90 | hip | - | rms_norm_triton | build | no backend cuda for sm_90; it has hip
rms_norm | m=1,n=4096 | xpu:pvc | both | - | rms_norm_triton | build | no backend xpu for xpu:pvc; it has cuda, hip
rms_norm | m=1,n=4096 | cpu:avx2 | torch | - | rms_norm_cpu | build | no C++ level that runs on cpu:avx2; it has none
rms_norm | m=1,n=4096 | cpu:avx2 | arm | - | rms_norm_cpu | build | no C++ level that runs on cpu:avx2
rms_norm | m=1,n=4096 | cpu:neon | x86 | - | rms_norm_cpu | build | no C++ level that runs on cpu:neon; it has cpu:base, cpu:avx2
rms_norm | m=1,n=4096 | cpu:sve | x86-base | - | rms_norm_cpu | build | no C++ level that runs on cpu:sve; it has cpu:base
rms_norm | m=1,n=4096 | cpu:avx512 | s390x | - | rms_norm_cpu | build | no C++ level that runs on cpu:avx512; it has cpu:base
rms_norm | m=1,n=4096 | sm_90 | cuda | flashinfer | rms_norm_flashinfer | build | package flashinfer-python is not installed
rms_norm | m=1,n=4096 | sm_90 | flashinfer-old | flashinfer | rms_norm_flashinfer | build | flashinfer-python is 0.2.4; 0.2.5 or newer
rms_norm | m=1,n=4096 | sm_90 | flashinfer-moved | flashinfer | rms_norm_flashinfer | build | offers no rmsnorm
rms_norm | m=1,n=4096 | gfx942 | aiter-other | aiter | rms_norm_aiter | build | aiter is installed, but has no
rms_norm | m=1,n=4096 | gfx942 | hip | aiter | rms_norm_aiter | build | was not looked for
paged_attention | ~paged | sm_90 | flashinfer-old | flashinfer | paged_attention_flashinfer | build | 0.6 or newer is needed
mla_attention | ~mla | sm_90 | flashinfer-old | flashinfer | mla_attention_flashinfer | build | 0.6 or newer is needed
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming-old | humming | linear_humming | build | 0.1.19 or newer is needed
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming-other | humming | linear_humming | build | package humming-kernels is not installed
linear | m=16,n=4096,k=4096,w=fp8_block.fp8_g128 | sm_90 | deepgemm-other | deepgemm | linear_deepgemm | build | offers no fp8_gemm_nt
linear | m=16,n=4096,k=4096,w=fp8_ch.fp8_token | gfx942 | aiter-other | aiter | linear_aiter | build | aiter is installed, but has no
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx2 | none | - | linear_cpu | build | no C++ level
# the problem
rms_norm | m=1,n=4096,x=fp32 | sm_90 | flashinfer | flashinfer | rms_norm_flashinfer | problem | takes fp16 and bf16, not fp32
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | cuda | - | linear_triton | problem | not int4_g128
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | cuda | - | linear_torch | problem | multiplies dense weights, not int4_g128
linear | m=16,n=4096,k=4096 | sm_90 | cuda | - | linear_dequant_torch | problem | multiplies quantized weights, not dense ones
linear | m=17,n=4096,k=4096 | sm_90 | sm90a | - | linear_dense_decode_sm90 | problem | made for M <= 16, not 17
linear | m=1,n=4096,k=4100 | sm_90 | sm90a | - | linear_dense_decode_sm90 | problem | K = 4100 is not a multiple
linear | m=1,n=4096,k=4096,x=fp16,w=bf16 | sm_90 | sm90a | - | linear_dense_decode_sm90 | problem | not fp16 by bf16
linear | m=1,n=4096,k=4096,w=int4_g128 | sm_90 | sm90a | - | linear_dense_decode_sm90 | problem | not bf16 by int4_g128
linear | m=1,n=4096,k=4096 | sm_100 | sm90a | - | linear_dense_decode_sm90 | hardware | lacks wgmma
linear | m=16,n=4096,k=4096,w=int8_ch.int8_token | cpu:avx512_vnni | x86 | - | linear_cpu | problem | not int8_token
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx2 | x86 | - | linear_a8_cpu | problem | not their own dtype
linear | m=1,n=4096,k=4096,w=int4_g32_min | cpu:avx2 | x86 | - | linear_a8_groups_cpu | problem | not their own dtype
linear | m=1,n=4096,k=4096,w=int4_g32.int8_g32 | cpu:avx2 | x86 | - | linear_a8_groups_cpu | problem | GGUF's integer types
linear | m=1,n=4096,k=4096,w=int3_g16.int8_g32 | cpu:avx2 | x86 | - | linear_a8_groups_cpu | problem | GGUF's integer types
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | deepgemm | deepgemm | linear_deepgemm | problem | multiplies fp8_block.fp8_g128, not int4_g128
linear | m=16,n=4096,k=4096,x=fp16,w=fp8_block.fp8_g128 | sm_90 | deepgemm | deepgemm | linear_deepgemm | problem | writes bf16, not fp16
linear | m=16,n=4096,k=4000,w=fp8_block.fp8_g128 | sm_90 | deepgemm | deepgemm | linear_deepgemm | problem | K a multiple of 128
linear | m=16,n=4096,k=4096,w=fp8_ch | sm_90 | humming | humming | linear_humming | problem | not fp8_ch
linear | m=16,n=4096,k=4096,w=int4_g128,act_order=true | sm_90 | humming | humming | linear_humming | problem | takes no act-order
linear | m=16,n=4100,k=4096,w=int4_g128 | sm_90 | humming | humming | linear_humming | problem | needs N a multiple of 128
linear | m=16,n=4096,k=4096,x=fp32,w=fp8_ch.fp8_token | gfx942 | aiter | aiter | linear_aiter | problem | writes bf16 or float16, not fp32
paged_attention | ~paged,head_dim=512 | sm_90 | cuda | - | paged_attention_triton | problem | head_dim 512 is over 256
paged_attention | ~paged,head_dim=256,block_size=7 | sm_90 | sm90a | invariant | paged_attention_sm90 | problem | pages of a multiple of 8
paged_attention | ~paged,sinks=true | sm_90 | flashinfer | flashinfer | paged_attention_flashinfer | problem | take no sinks
paged_attention | ~paged,head_dim=80 | sm_90 | flashinfer | flashinfer | paged_attention_flashinfer | problem | head_dim 80
paged_attention | ~paged,softcap=true | sm_90 | flashinfer | flashinfer | paged_attention_flashinfer | problem | without a soft cap
mla_attention | ~mla,latent_dim=128 | sm_90 | flashinfer | flashinfer | mla_attention_flashinfer | problem | FlashInfer has 512 and 64
mla_attention | ~mla,latent_dim=1024 | sm_90 | cuda | - | mla_attention_triton | problem | latent_dim 1024 is over 512
varlen_attention | ~varlen,x=fp32 | sm_90 | sm90a | - | varlen_attention_sm90 | problem | not fp32
varlen_attention | ~varlen,qk_dim=256,window_left=512,window_right=512 | sm_90 | sm90a | - | varlen_attention_sm90 | problem | keys of up to 192
varlen_attention | ~varlen,qk_dim=32,v_dim=32,window_right=-1 | sm_90 | sm90a | - | varlen_attention_sm90 | problem | 64 elements and more
varlen_attention | ~varlen,v_dim=132 | sm_90 | sm90a | - | varlen_attention_sm90 | problem | multiples of 8
varlen_attention | ~varlen,v_dim=192 | sm_90 | sm90a | - | varlen_attention_sm90 | problem | values of up to 128
varlen_attention | ~varlen | sm_90 | cuda | - | varlen_attention_sm90 | build | sm_90a
# the policy
rms_norm | m=1,n=4096 | sm_90 | cuda | torch | rms_norm_triton | policy | strict policy: not among the pinned kernels
rms_norm | m=1,n=4096 | sm_90 | cuda | no-triton | rms_norm_triton | policy | excluded by '*triton*'
rms_norm | m=1,n=4096 | gfx942 | aiter | - | rms_norm_aiter | policy | runs only when pinned
rms_norm | m=1,n=4096,x=fp32 | cpu:avx2 | onnxruntime | - | rms_norm_onnxruntime | policy | runs only when pinned
rms_norm | m=1,n=4096,x=bf16 | cpu:avx2 | onnxruntime | onnxruntime | rms_norm_onnxruntime | problem | fp32 and fp16
rms_norm | m=1,n=4096,x=fp32 | cpu:avx2 | x86 | onnxruntime | rms_norm_onnxruntime | build | onnxruntime is not installed
rms_norm | m=1,n=4096 | cpu:avx2 | x86-interpreter | - | rms_norm_triton | policy | only interprets, for tests
linear | m=16,n=4096,k=4096,w=int4_g128 | sm_90 | humming | humming-det | linear_humming | policy | not deterministic
paged_attention | ~paged | sm_90 | cuda | invariant | paged_attention_triton_split | policy | requires batch invariance
paged_attention | ~paged | sm_90 | flashinfer | flashinfer-det | paged_attention_flashinfer | policy | requires batch invariance
mla_attention | ~mla | sm_90 | flashinfer | - | mla_attention_flashinfer | policy | runs only when pinned
linear | m=16,n=4096,k=4096,w=int4_g128 | cpu:avx2 | x86 | triton | linear_cpu | policy | strict policy
"""

FAKE = """
# sm_100a code runs on sm_100 alone; sm_110 and sm_120 never get it
sm100a | sm_100 | blackwell | serves
sm100a | sm_103 | blackwell | hardware | sm_100a code runs only on sm_100, not on sm_103
sm100a | sm_110 | blackwell | hardware | sm_100a code runs only on sm_100, not on sm_110
sm100a | sm_120 | blackwell | hardware | sm_120 lacks tcgen05
sm100a | sm_121 | blackwell | hardware | sm_121 lacks tcgen05
sm100a | sm_90 | blackwell | hardware | sm_90 lacks tcgen05
sm100a | sm_100 | sm90a | build | no code for sm_100a; it has sm_90a
sm100f | sm_100 | blackwell | serves
sm100f | sm_103 | blackwell | serves
sm100f | sm_110 | blackwell | hardware | runs only on its family
sm100f | sm_120 | blackwell | hardware | runs only on its family
sm100f | sm_121 | blackwell | hardware | runs only on its family
# sm_121 is served where sm_120 is, but for arch-specific code
sm120 | sm_120 | blackwell | serves
sm120 | sm_121 | blackwell | serves
sm120 | sm_110 | blackwell | hardware | runs only on sm_12x
sm120f | sm_121 | blackwell | serves
sm120f | sm_100 | blackwell | hardware | runs only on its family
sm120a | sm_121 | blackwell | hardware | sm_120a code runs only on sm_120
block-scale | sm_120 | cuda | serves
block-scale | sm_121 | cuda | serves
block-scale | sm_100 | cuda | hardware | sm_100 lacks mma.sync.block_scale
# Hopper's wgmma is nobody else's
sm90a | sm_90 | sm90a | serves
sm90a | sm_100 | sm90a | hardware | sm_100 lacks wgmma
sm90a | sm_120 | sm90a | hardware | sm_120 lacks wgmma
sm90a | sm_89 | sm90a | hardware | sm_89 lacks
sm90a | sm_90 | cuda | build | no code for sm_90a; it has none
cute90 | sm_90 | blackwell | serves
cute100 | sm_100 | blackwell | serves
cute100 | sm_103 | blackwell | serves
cute100 | sm_110 | blackwell | hardware | runs only on its family
cute100 | sm_90 | blackwell | hardware | sm_100f code runs only
cute100 | sm_100 | cuda | build | package nvidia-cutlass-dsl is not installed
cute90 | sm_90 | cuda | build | package nvidia-cutlass-dsl is not installed
cute90 | sm_100 | blackwell | hardware | sm_90a code runs only on sm_90
# cubins and PTX
any-cuda | sm_86 | ampere | serves
any-cuda | sm_87 | ampere | build | no CUDA architecture that runs on sm_87
any-cuda | sm_90 | ampere | build | no CUDA architecture that runs on sm_90; it has sm_80
any-cuda | sm_90 | ptx | serves
any-cuda | sm_75 | ptx | build | no CUDA architecture that runs on sm_75
any-cuda | gfx942 | ampere | hardware | CUDA code; gfx942 is amd
# tensor cores by format
mma-fp8 | sm_89 | cuda | serves
mma-fp8 | sm_90 | cuda | serves
mma-fp8 | sm_121 | cuda | serves
mma-fp8 | sm_80 | cuda | hardware | sm_80 lacks mma.fp8
mma-fp8 | sm_86 | cuda | hardware | sm_86 lacks mma.fp8
mma-int4 | sm_80 | cuda | serves
mma-int4 | sm_90 | cuda | hardware | sm_90 lacks mma.int4
mxfp4 | sm_110 | both | serves
mxfp4 | gfx950 | both | serves
mxfp4 | gfx1250 | both | serves
mxfp4 | sm_90 | both | hardware | sm_90 lacks
mxfp4 | gfx942 | both | hardware | gfx942 lacks
# fp8 of AMD: gfx942 has fnuz, gfx950 and gfx12 have OCP
fnuz | gfx942 | rocm | serves
fnuz | gfx950 | rocm | hardware | gfx950 lacks fp8.fnuz
fnuz | gfx1201 | rocm | hardware | gfx1201 lacks fp8.fnuz
fnuz | gfx90a | rocm | hardware | gfx90a lacks fp8.fnuz, mfma.fp8
ocp | gfx950 | rocm | serves
ocp | gfx1201 | rocm | serves
ocp | gfx942 | rocm | hardware | gfx942 lacks fp8.ocp
ocp | gfx1100 | rocm | hardware | gfx1100 lacks fp8.ocp
hip942 | gfx942 | rocm | serves
hip942 | gfx950 | rocm | hardware | gfx942 code runs only on gfx942, not on gfx950
hip942 | sm_90 | rocm | hardware | gfx942 is code for amd; sm_90 is nvidia
hip11 | gfx1101 | rocm | serves
hip11 | gfx1151 | rocm | serves
hip11 | gfx1201 | rocm | hardware | gfx11-generic code does not run on gfx1201
# CPU levels
vnni | cpu:avx512_bf16 | x86 | serves
vnni | cpu:avx512 | x86 | hardware | needs avx512_vnni, which this CPU lacks
vnni | cpu:avx2 | x86 | hardware | which this CPU lacks
vnni | cpu:avx512_vnni | x86-avx2 | build | no code for cpu:avx512_vnni; it has cpu:base, cpu:avx2
vnni | cpu:sve | arm | hardware | level of x86-64; this CPU is aarch64
amx | cpu:amx | x86 | build | no code for cpu:amx
amx | cpu:avx512_bf16 | x86 | hardware | which this CPU lacks
i8mm | cpu:sve | arm | serves
i8mm | cpu:neon_dotprod | arm | hardware | needs neon_i8mm, which this CPU lacks
"""


def _fake(name: str, requires: Requirement) -> Kernel:
    return kernel(name, requires=requires, priority=10, language="cuda")


_any = Requirement.any
FAKES: dict[str, Kernel] = {
    k.name: k
    for k in (
        _fake("sm100a", _any({"tcgen05"}, code="cuda:sm_100a")),
        _fake("sm100f", Requirement(code="cuda:sm_100f")),
        _fake("sm120", Requirement(code="cuda:sm_120")),
        _fake("sm120f", Requirement(code="cuda:sm_120f")),
        _fake("sm120a", Requirement(code="cuda:sm_120a")),
        _fake("block-scale", _any({"mma.sync.block_scale"}, code="triton")),
        _fake("sm90a", _any({"wgmma", "tma"}, code="cuda:sm_90a")),
        _fake("cute90", Requirement(code="cutedsl:sm_90a")),
        _fake("cute100", Requirement(code="cutedsl:sm_100f")),
        _fake("any-cuda", Requirement(code="cuda")),
        _fake("mma-fp8", _any({"mma.fp8"}, code="triton")),
        _fake("mma-int4", _any({"mma.int4"}, code="triton")),
        _fake("mxfp4", _any({"mma.mxf4"}, {"mfma.mxf4"}, {"wmma.mxf4"}, code="triton")),
        _fake("fnuz", _any({"mfma.fp8", "fp8.fnuz"}, vendors=("amd",))),
        _fake("ocp", _any({"mfma.fp8", "fp8.ocp"}, {"wmma.fp8", "fp8.ocp"}, vendors=("amd",))),
        _fake("hip942", Requirement(code="hip:gfx942")),
        _fake("hip11", Requirement(code="hip:gfx11-generic")),
        _fake("vnni", Requirement(code="cpp:avx512_vnni")),
        _fake("amx", Requirement(code="cpp:amx")),
        _fake("i8mm", Requirement(code="cpp:neon_i8mm")),
    )
}


def rows(table: str) -> list[list[str]]:
    """Returns the cells of a table above, without comments and empty lines."""
    for short, text in PROBLEMS.items():
        table = table.replace(short, text)
    lines = (line for line in table.splitlines() if line.strip() and not line.startswith("#"))
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]
