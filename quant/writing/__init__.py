"""Writing quantized model directories, one layer in memory at a time: round to nearest, GPTQ, AWQ. An interrupted run resumes."""
