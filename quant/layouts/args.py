"""What packing passes to native entries."""

from gristmill.quant.argument_struct import ArgumentStruct

CODES = ArgumentStruct(
    "GmRows16CodesArgs",
    "The arguments of gm_rows16_codes: codes in rows [n, 4 * words bytes] -> [ceil(n / 16), words, 64 bytes].",
    """
    const void* rows;
    int64_t row_bytes;  // from one row to the next
    int64_t n, words;
    int32_t nibbles;    // codes have 4 bits, columns in order from the low nibble
    uint32_t padding;   // the word of rows from n on
    void* packed;
    """,
)

VALUES = ArgumentStruct(
    "GmRows16ValuesArgs",
    "The arguments of gm_rows16_values: values in rows [n, groups], of 1, 2 or 4 bytes, -> [ceil(n / 16), groups, 16].",
    """
    const void* rows;
    int64_t row_values;  // from one row to the next
    int64_t n, groups;
    int32_t bytes;
    uint32_t padding;    // the bits of rows from n on
    void* packed;
    """,
)

FACTORS = ArgumentStruct(
    "GmGroupFactorsArgs",
    "The arguments of gm_group_factors: float32 values [runs, per] as int8 integers times a factor of each run.",
    """
    const float* values;
    int64_t runs, per;
    float* factors;    // [runs]
    int8_t* integers;  // [runs, per]
    int32_t* exact;    // 1 if the products are the values, bit for bit
    """,
)
