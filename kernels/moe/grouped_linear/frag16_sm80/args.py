"""What the launcher of grouped linear over frag16 tiles passes to native entries for sm_80 and newer."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmGroupedFrag16Sm80Args",
    "The arguments of every gm_grouped_linear_<format>_sm80.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [rows, n or n / 2]; rows past the last expert's become 0
    const void* x;  // [x_rows, k], rows ldx elements apart
    int64_t ldx;  // in elements
    const void* w;  // [experts, n, k] as tiles of a frag16 layout
    const void* bias;  // [experts, n] or null
    const float* row_scale;  // [experts, n], multiplies the sums of a row of W; or null
    const int32_t* offsets;  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1] of y
    const int32_t* permutation;  // [rows]: row p of y is of row permutation[p] / top_k of x; null: of row p
    int32_t rows;
    int32_t x_rows;
    int32_t experts;
    int32_t n;  // rows of an expert's W
    int32_t k;
    int32_t top_k;
    int32_t silu_mul;  // y = silu(first half of the rows of W) * second half
    int32_t clamp;  // with silu_mul: the clamped form of gpt-oss, by alpha and limit
    float alpha;
    float limit;
    int32_t x_type;  // of x, y and bias: 1 fp16, 2 bf16
    int32_t scale_type;  // of 16-bit scales in the tiles: 1 fp16, 2 bf16, 0 none

    // mt, warps name an instance

    int32_t mt;  // rows of x per tile
    int32_t warps;  // per CTA, two tiles of 16 rows of W each
    int32_t grid;  // CTAs that walk over the tiles of y, at most
    """,
)
