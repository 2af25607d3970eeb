"""What the launchers of linear with 8-bit activations pass to native entries."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearW8a8Args",
    "The arguments of every gm_linear_w8a8_<format>_sm90.",
    """
    int32_t device;  // ordinal; -1: nothing is launched, the bytes of shared memory are returned
    void* stream;  // CUstream
    void* y;  // [m, n] contiguous
    const void* x;  // [m, k] 8-bit values, rows ldx apart
    int64_t ldx;
    const void* w;  // [n, k] contiguous
    const void* x_scale;  // float32 [m], or [k blocks, x_pitch]
    const void* x_sum;  // int32 [m]: int8 only
    const void* w_scale;  // [n], or [block rows, k blocks]
    const void* row_block;  // int32 [n]: blocks only
    const void* bias;  // [n] or null
    const void* residual;  // [m, n] or null
    int32_t m, n, k;
    int32_t y_type;  // 1 fp16, 2 bf16
    int32_t w_type;  // of w_scale: 0 float32, 1 fp16, 2 bf16
    int32_t x_pitch;  // blocks: floats from one k block of x_scale to the next, a multiple of 4
    int32_t pdl;
    int32_t rows, columns, plain;  // the instance
    int32_t slots, split, ctas;  // ctas: those of a multiprocessor
    int32_t band, grid;  // grid: CTAs at most where tiles are not cut
    """,
)

QUANTIZE = ArgumentStruct(
    "GmQuantizeRowsArgs",
    "The arguments of gm_quantize_rows_sm90.",
    """
    int32_t device;
    int32_t m, k;
    int32_t pitch;  // fp8_g128: floats from one group of scales to the next
    int32_t format;  // 0 fp8_token (scales [m]), 1 fp8_g128 (scales [groups, pitch]), 2 int8_token (scales and sums of codes [m])
    int32_t x_type;  // 1 fp16, 2 bf16
    void* stream;  // a CUstream of the device
    void* codes;  // [m, k]
    float* scales;
    int32_t* sums;  // int8_token only
    const void* x;  // [m, k], rows ldx elements apart, 16-byte aligned
    int64_t ldx;
    """,
)
