"""What the launcher of grouped linear over dense weights passes to native entries."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmGroupedDenseArgs",
    "The arguments of every gm_grouped_dense_<type>_sm90.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [rows, n or n / 2], contiguous
    const void* x;  // [x_rows, k], sorted by expert, rows ldx elements apart
    int64_t ldx;  // in elements
    const void* w;  // [experts, n, k], contiguous
    const void* bias;  // [experts, n], or null
    const int32_t* offsets;  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1] of x and y
    int32_t rows;
    int32_t x_rows;
    int32_t experts;
    int32_t n;  // rows of an expert's W
    int32_t k;
    int32_t silu_mul;  // y = silu(first half of the rows of W) * second half
    int32_t clamp;  // instead g sigmoid(alpha g) (u + 1), g = min(gate, limit) and u = up within -limit .. limit
    float alpha;
    float limit;
    int32_t pdl;  // programmatic dependent launch
    int32_t early;  // offsets are those of the launch before, which had them, too
    int32_t clear;  // rows of y past the last expert's become 0

    // mt, blocks, groups, slices, cluster name an instance

    int32_t mt;  // rows of x per tile, at most
    int32_t blocks;  // blocks of rows of W per warpgroup
    int32_t groups;  // warpgroups with blocks of their own
    int32_t slices;  // warpgroups that take turns along K for each of those
    int32_t cluster;  // CTAs that share rows of x: 1 or 2
    int32_t w_rows;  // rows of W of a block: 16, 32, 48 or 64
    int32_t lag;  // slots by which the second warpgroup begins after the first
    int32_t grid;  // CTAs that walk over the tiles of y, at most
    """,
)
