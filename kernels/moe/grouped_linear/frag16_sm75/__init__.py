"""Grouped linear over frag16 tiles for sm_75 (Turing): the kernel for sm_80 in instructions that Turing has."""
