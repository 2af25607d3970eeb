"""What the launcher of products of block-scaled codes passes to the native entries for sm_120 and sm_121."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearBlockScaledArgs",
    "The arguments of gm_linear_<format>_sm120f.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [m, n]
    const void* x;  // [m, k] codes, packed, 16-byte aligned
    const void* w;  // [n, k] codes, packed, 16-byte aligned
    const void* x_scale;  // [m, k / group], 8-byte aligned
    const void* w_scale;  // [n, k / group], 8-byte aligned
    const float* x_factor;  // of all of x, or null
    const float* w_factor;  // [n] or null
    const void* bias;  // [n] or null
    const void* residual;  // [m, n] or null
    uint32_t* counters;  // one per tile of y that CTAs share, zero before and after; null if they share none
    float* sums;  // partial sums of the CTAs that share a tile of y; null if they share none
    int32_t m, n, k;  // k: a multiple of 128
    int32_t y_type;  // of y, bias and residual: 1 fp16, 2 bf16
    int32_t mt, warps;  // the instance: rows of x per CTA; warps, 32 rows of W each
    int32_t grid;  // CTAs that walk over the tiles of y
    int32_t share;  // 1: tiles past the last whole wave are dealt out along K
    """,
)

QUANTIZE = ArgumentStruct(
    "GmQuantizeBlocksArgs",
    "The arguments of gm_quantize_blocks_sm120f.",
    """
    int32_t device;
    int32_t m, k;  // k: a multiple of 128
    int32_t x_type;  // 1 fp16, 2 bf16
    int32_t format;  // of the codes: 0 nvfp4, 1 mxfp4, 2 mxfp8
    int32_t by_row;  // nvfp4: 1 = a factor for each row, 0 = one of all of x
    void* stream;  // a CUstream of the device
    void* codes;  // [m, k], packed
    void* scales;  // [m, k / group]
    float* factor;  // nvfp4: that of all of x, or [m], to write; else null
    float* maxima;  // nvfp4 with one factor: room for 256; else null
    const void* x;  // [m, k], rows ldx elements apart, 16-byte aligned
    int64_t ldx;
    """,
)
