"""What the launchers of experts with 8-bit activations pass to native entries."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmGroupedW8a8Args",
    "The arguments of every gm_grouped_w8a8_<format>_sm90.",
    """
    int32_t device;  // ordinal; -1: nothing is launched, the bytes of shared memory are returned
    void* stream;  // CUstream
    void* y;  // [rows, n] contiguous
    const void* x;  // [rows, k] 8-bit values, contiguous, sorted by expert
    const void* w;  // [experts, n, k] contiguous
    const void* x_scale;  // float32 [rows]; blocks: [k blocks, x_pitch], see scale_column in experts.h
    const void* w_scale;  // [experts, n]; blocks: [experts, block rows, k blocks]
    const void* row_block;  // int32 [n]: blocks only
    const int32_t* offsets;  // [experts + 1]: expert e has the rows offsets[e] .. offsets[e + 1]
    int32_t rows, experts, n, k;
    int32_t y_type;  // 1 fp16, 2 bf16
    int32_t w_type;  // of w_scale: 0 float32, 1 fp16, 2 bf16
    int32_t block_rows;  // blocks: of an expert
    int32_t x_pitch;  // blocks: floats from one k block of x_scale to the next, a multiple of 4
    int32_t pdl;
    int32_t tile_a, tile_b, plain;  // the instance: rows of operands A and B of a tile, whether A is x
    int32_t slots, ctas;  // ctas: those of a multiprocessor
    int32_t grid;  // CTAs at most
    """,
)

QUANTIZE = ArgumentStruct(
    "GmMoeQuantizeArgs",
    "The arguments of gm_moe_quantize_sm90: rows of x, or of its gated activation, in the order of experts.",
    """
    int32_t device;
    int32_t tokens, top_k, k, experts;
    int32_t gated;  // x is gate and up [tokens * top_k, 2 k] in the order of experts
    int32_t groups;  // scales of 128 columns, [groups, pitch], and not of rows
    int32_t type;  // of x: 1 fp16, 2 bf16
    void* stream;  // a CUstream of the device
    void* codes;  // [tokens * top_k, k]
    float* scales;
    const void* x;  // [tokens, k], rows ldx elements apart
    int64_t ldx;
    const int32_t* ids;  // [tokens, top_k]
    const int32_t* inverse;  // [tokens * top_k]
    const int32_t* offsets;  // [experts + 1]
    """,
)

PLACE = ArgumentStruct(
    "GmMoePlaceCodesArgs",
    "The arguments of gm_moe_place_codes_sm90: given codes of tokens, copied in the order of experts.",
    """
    int32_t device;
    int32_t tokens, top_k, k, experts;
    int32_t groups;  // scales of a token, for 128 columns each; 0: one
    void* stream;  // a CUstream of the device
    void* codes;  // [tokens * top_k, k]
    float* scales;  // [tokens * top_k], or [groups, pitch]
    const void* given;  // [tokens, k] 8-bit values, rows given_stride apart
    const float* given_scales;  // of token t and group g: at t * row_stride + g * group_stride
    int64_t given_stride, row_stride, group_stride;
    const int32_t* ids;  // [tokens, top_k]
    const int32_t* inverse;  // [tokens * top_k]
    const int32_t* offsets;  // [experts + 1]
    """,
)
