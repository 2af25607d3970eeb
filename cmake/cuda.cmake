# The CUDA part; see below.
set(GM_CUDA_MANIFEST "")
