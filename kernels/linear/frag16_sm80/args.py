"""What the launchers of linear over frag16 tiles pass to the native entries for sm_80 and newer."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearFrag16Sm80Args",
    "The arguments of every gm_linear_<format>_<schedule>_sm80.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [m, n]
    const void* x;  // [m, k], rows ldx elements apart
    int64_t ldx;  // in elements
    const void* w;  // [n, k] as tiles of a frag16 layout
    const void* bias;  // [n] or null
    const void* residual;  // [m, n] or null
    const float* row_scale;  // [n], multiplies the sums of a row of W; or null
    uint32_t* counters;  // one per tile of y that CTAs share, zero before and after; null if they share none
    float* sums;  // partial sums of the CTAs that share a tile of y; null if they share none
    int32_t m;
    int32_t n;
    int32_t k;
    int32_t x_type;  // of x, y, bias and residual: 1 fp16, 2 bf16
    int32_t scale_type;  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none

    // decode; nt, rt, wk name an instance

    int32_t split;  // CTAs that share a tile of y along K
    int32_t nt;  // columns of x in eights
    int32_t rt;  // tiles of 16 rows of W per warp
    int32_t wk;  // warps along K

    // gemm; mt, warps name an instance

    int32_t mt;  // rows of x per CTA
    int32_t warps;  // per CTA, 32 rows of W each
    int32_t grid;  // CTAs that walk over the tiles of y
    int32_t share;  // 1: tiles past the last whole wave are dealt out along K
    """,
)
