"""Quantizing a model directory, one layer in memory at a time: round to nearest, GPTQ, AWQ. An interrupted run resumes."""
