"""Quantizing a model directory, one layer in memory at a time: round to nearest, GPTQ, AWQ; to be continued when interrupted."""
