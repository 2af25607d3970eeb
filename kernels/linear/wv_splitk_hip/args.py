"""What the launcher of wvSplitK passes to its native entry."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearWvSplitKArgs",
    "The arguments of gm_linear_wv_splitk.",
    """
    int32_t device;
    int32_t format;  // 0 dense, 1 int4, 2 int8
    int32_t x_type;  // DTYPE_CODES
    int32_t lanes;
    void* stream;
    const char* arch;  // gfx1100
    void* y;
    const void* x;
    const void* w;
    const void* scales;  // [n, groups]; unused if dense
    const uint8_t* zeros;  // codes of the zero points [n, groups]; null: 2^(bits - 1)
    const void* bias;  // [n], null without
    const void* residual;  // [m, columns of y], null without
    float* sums;  // of splits > 1: [splits, tiles, waves, 2 M]
    uint32_t* counters;  // of splits > 1: [tiles], zero before and after
    int64_t ldx;  // elements between rows of x
    int32_t m, n, k;
    int32_t chunk;  // columns of W per chunk of x in LDS
    int32_t per_split;  // chunks per split
    int32_t splits, tiles, blocks;
    int32_t groups, group_shift;  // a column k belongs to scale k >> group_shift of its row
    int32_t scale_type;  // DTYPE_CODES
    int32_t silu_mul;  // rows of W: gate, then up
    int32_t vectors;  // rows of x are aligned to 16 bytes
    """,
)
