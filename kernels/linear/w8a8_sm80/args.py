"""What the launcher of linear with 8-bit activations passes to the native entries for sm_80 and newer."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearW8a8Sm80Args",
    "The arguments of gm_w8a8_linear_int8_sm80 and of its twins for other operands.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [m, n]
    const void* x;  // codes [m, k], rows ldx apart, 16-byte aligned
    int64_t ldx;  // a multiple of 16
    const void* w;  // codes [n, k], int8 ones offset by 128
    const void* x_scale;  // float32 [m], or [1]; of blocks [k blocks, x_pitch]
    const void* w_scale;  // [n]; of blocks [block rows, k blocks]
    const void* row_block;  // of blocks: int32 [n]
    const void* bias;  // [n] or null
    const void* residual;  // [m, n] or null
    uint32_t* counters;  // one per tile of y that CTAs share, zero before and after; null if they share none
    void* sums;  // partial sums of the CTAs that share a tile of y; null if they share none
    int32_t m, n, k;
    int32_t y_type;  // of y, bias and residual: 1 fp16, 2 bf16
    int32_t w_type;  // of w_scale: 0 float32, 1 fp16, 2 bf16
    int32_t x_step;  // 0: x_scale has one number, 1: one for each row
    int32_t x_pitch;  // of blocks: floats from one k block of x_scale to the next, a multiple of 4
    int32_t mt, warps;  // the instance: rows of x per CTA; warps, 32 rows of W each
    int32_t grid;  // CTAs that walk over the tiles of y
    int32_t share;  // 1: tiles past the last whole wave are dealt out along K
    """,
)

QUANTIZE = ArgumentStruct(
    "GmQuantizeInt8Sm80Args",
    "The arguments of gm_quantize_int8_sm80.",
    """
    int32_t device;
    int32_t m, k;  // k: a multiple of 16
    int32_t x_type;  // 1 fp16, 2 bf16
    void* stream;  // a CUstream of the device
    void* codes;  // int8 [m, k]
    float* scales;  // [m]
    const void* x;  // [m, k], rows ldx elements apart, 16-byte aligned
    int64_t ldx;
    """,
)

QUANTIZE_FP8 = ArgumentStruct(
    "GmQuantizeFp8Sm89Args",
    "The arguments of gm_quantize_fp8_sm89.",
    """
    int32_t device;
    int32_t m, k;  // k: a multiple of 16
    int32_t format;  // 0 fp8_token (scales [m]), 1 fp8_g128 (scales [groups, pitch]), 2 fp8 (scales [m], all alike)
    int32_t pitch;  // fp8_g128: floats from one group of scales to the next
    int32_t x_type;  // 1 fp16, 2 bf16
    void* stream;  // a CUstream of the device
    void* codes;  // e4m3 [m, k]
    float* scales;
    float* maxima;  // fp8: room for 256
    const void* x;  // [m, k], rows ldx elements apart, 16-byte aligned
    int64_t ldx;
    """,
)
