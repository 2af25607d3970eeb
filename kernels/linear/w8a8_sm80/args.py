"""What the launcher of linear with int8 activations passes to the native entries for sm_80 and newer."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearW8a8Sm80Args",
    "The arguments of gm_w8a8_linear_sm80.",
    """
    int32_t device;  // ordinal; < 0: launch nothing, return the dynamic shared memory in bytes
    void* stream;  // a CUstream of the device
    void* y;  // [m, n]
    const void* x;  // int8 [m, k], rows ldx apart, 16-byte aligned
    int64_t ldx;  // a multiple of 16
    const void* w;  // [n, k], codes offset by 128
    const void* x_scale;  // float32 [m]
    const void* w_scale;  // [n]
    const void* bias;  // [n] or null
    const void* residual;  // [m, n] or null
    uint32_t* counters;  // one per tile of y that CTAs share, zero before and after; null if they share none
    int32_t* sums;  // partial sums of the CTAs that share a tile of y; null if they share none
    int32_t m, n, k;
    int32_t y_type;  // of y, bias and residual: 1 fp16, 2 bf16
    int32_t w_type;  // of w_scale: 0 float32, 1 fp16, 2 bf16
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
