"""What the launcher of dense products of a few dozen rows passes to its native entry."""

from gristmill.quant.argument_struct import ArgumentStruct

ARGS = ArgumentStruct(
    "GmLinearDenseMidArgs",
    "The arguments of gm_dense_mid_sm90.",
    """
    int32_t device;  // ordinal; negative: the entry only answers with the bytes of shared memory of a CTA
    void* stream;  // a CUstream of the device
    const void* w;  // [n, k], 16-byte aligned
    const void* x;  // [m, k], rows ldx elements apart, 16-byte aligned
    int64_t ldx;  // in elements, a multiple of 8, k at least
    const void* bias;  // [n] or null
    const void* residual;  // as y, or null
    void* y;  // [m, n], with silu_mul [m, n / 2]
    int32_t m;  // 0 to 128
    int32_t n;
    int32_t k;  // a multiple of 8
    int32_t type;  // of all tensors: 1 fp16, 2 bf16
    int32_t silu_mul;  // y = silu(z[:, : n / 2]) * z[:, n / 2 :]
    int32_t pdl;  // programmatic dependent launch
    int32_t rows;  // of W, of a CTA: 64, 128, 192 or 256
    int32_t split;  // CTAs of a cluster, along K: 1 to 8
    int32_t ctas;  // of a multiprocessor, 1 to 4, which share its memory
    """,
)
