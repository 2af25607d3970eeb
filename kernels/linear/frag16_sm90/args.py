"""What the launchers of linear over frag16 tiles pass to native entries."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearFrag16Args",
    "The arguments of every gm_linear_<format>_<schedule>_sm90. A schedule reads the fields it has use for; instances.json "
    "says which of them name an instance.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [m, n], with `gated` [m, n / 2]
    const void* x;  // [m, k], rows ldx elements apart
    int64_t ldx;  // in elements
    const void* w;  // [n, k] as tiles of a frag16 layout
    const void* bias;  // [n] or null
    const void* residual;  // of the shape of y, or null
    const float* row_scale;  // [n], multiplies the sums of a row of W; or null
    void* scratch;  // gemm_ws with `even`: flag_bytes zeros, then grid * mt * c * 256 bytes
    int32_t m;
    int32_t n;
    int32_t k;
    int32_t x_type;  // of x, y, bias and residual: 1 fp16, 2 bf16
    int32_t scale_type;  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none
    int32_t pdl;  // programmatic dependent launch
    int32_t split;  // CTAs of a cluster that share a tile of y along K: 1, 2, 4 or 8

    // decode and decode_ws; nt, rt, wn, wk name an instance

    int32_t nt;  // columns of x in eights
    int32_t rt;  // tiles of 16 rows of W per warp
    int32_t wn;  // warps along N (decode_ws)
    int32_t wk;  // warps along K
    int32_t depth;  // slots of the ring of weights: of a warp (decode), of a CTA, a multiple of wk (decode_ws)

    // gemm_ws; mt, c, slices, ctas name an instance

    int32_t mt;  // rows of x per CTA
    int32_t c;  // blocks of 64 rows of W per CTA
    int32_t slices;  // warpgroups that take turns along K for each block
    int32_t ctas;  // CTAs per multiprocessor
    int32_t grid;  // CTAs that walk over the tiles of y
    int32_t raster;  // tiles along M that follow each other in time
    int32_t even;  // the last tiles are dealt out along K: 0 not, 1 one or two per CTA, 2 the remainder
    int32_t lag;  // groups of 128 k that one half of a CTA's warpgroups stays behind the other
    int32_t gated;  // y = silu(gate) * up, [m, n / 2], of the two halves of the rows of w; n is a multiple of 64
    """,
)

GATHER = ArgumentStruct(
    "GmGatherColumnsArgs",
    "The arguments of gm_gather_columns_sm90.",
    """
    int32_t device;
    int32_t m;
    int32_t columns;
    void* stream;  // a CUstream of the device
    void* out;  // [m, columns] of 16-bit values
    const void* x;  // [m, ...], rows ldx elements apart
    int64_t ldx;
    const int32_t* perm;  // [columns]
    """,
)
