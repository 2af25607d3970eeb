"""What `steps_sm90` passes to native entries beside the calls of operations."""

from gristmill.quant.argument_struct import ArgumentStruct

ROWS = ArgumentStruct(
    "GmMoeRowsArgs",
    "The arguments of gm_moe_rows_sm90: row p of y is row permutation[p] / top_k of x, for p < *last.",
    """
    int32_t device;
    int32_t columns;  // a multiple of 8
    int32_t top_k;
    void* stream;  // a CUstream of the device
    const void* x;  // [tokens, columns] of 16-bit floats, rows ldx elements apart
    int64_t ldx;
    void* y;  // [entries, columns]
    const int32_t* permutation;  // [entries]
    const int32_t* last;
    int64_t entries;
    """,
)
