"""What readers of formats pass to native entries."""

from gristmill.quant.argument_struct import ArgumentStruct

BLOCKS = ArgumentStruct(
    "GmGgufBlocksArgs",
    "The arguments of gm_gguf_blocks: blocks of a GGUF type -> codes and scales.",
    """
    const void* data;
    int64_t blocks;
    int32_t type;  // 2 Q4_0, 8 Q8_0, 39 MXFP4
    void* codes;
    void* scales;
    """,
)

AWQ = ArgumentStruct(
    "GmAwqRowsArgs",
    "The arguments of gm_awq_rows: words [k, columns] in AWQ's order -> a bit stream along k, [8 * columns, k / 2] bytes.",
    """
    const void* words;
    int64_t k, columns;
    void* codes;
    """,
)

STRINGS = ArgumentStruct(
    "GmGgufStringsArgs",
    "The arguments of gm_gguf_strings: `count` strings of a GGUF file, each behind its length in 8 bytes.",
    """
    const void* data;
    int64_t size;   // of data, in bytes
    int64_t start;  // of the first string
    int64_t count;
    void* out;      // the strings, a 0 after each; null: they are skipped
    int64_t* end;   // where they end
    """,
)
