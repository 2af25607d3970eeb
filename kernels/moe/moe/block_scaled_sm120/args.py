"""What the launcher of products of experts' block-scaled codes passes to the native entries for sm_120 and sm_121."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmGroupedBlockScaledArgs",
    "The arguments of gm_grouped_<format>_sm120f.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [rows, n or n / 2], 8-byte aligned; rows past the last expert's are not written
    const void* x;  // [x_rows, k] codes, packed, 16-byte aligned
    const void* w;  // [experts, n, k] codes, packed, 16-byte aligned
    const void* x_scale;  // [x_rows, k / group], 8-byte aligned
    const void* w_scale;  // [experts, n, k / group], 8-byte aligned
    const float* x_factor;  // [x_rows] or null
    const float* w_factor;  // [experts, n] or null
    const void* bias;  // [experts, n] or null
    const int32_t* offsets;  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1] of y
    const int32_t* permutation;  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
    int32_t rows;
    int32_t experts;
    int32_t n;  // rows of an expert's W; with silu_mul a multiple of 32, else of 8
    int32_t k;  // a multiple of 128
    int32_t top_k;
    int32_t silu_mul;  // y = silu(first half of the rows of W) * second half
    int32_t clamp;  // with silu_mul: the clamped form of gpt-oss, by alpha and limit
    float alpha;
    float limit;
    int32_t y_type;  // of y and bias: 1 fp16, 2 bf16
    int32_t mt, warps;  // the instance: rows of x per tile; warps, 32 rows of W each
    int32_t grid;  // CTAs that walk over the tiles of y, at most
    """,
)
