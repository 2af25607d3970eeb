"""gristmill's kernels beside those of other libraries on one GPU, all candidates of a problem in turn in one process.

    python -m lab.peers --seconds 540 --out peers.json

- A group (`groups/`, a file each) has the problems of one operation, by model, and says how their arguments are made.
- A peer (`libraries/`, a file each) says how a library is imported and called; one that is not installed is named in the result file.
- Our candidates are the kernel and configuration that selection takes for a layer, and the best of the others that could run.

Every candidate is compared with the operation's reference within its tolerance before it is timed (`race`); a wrong one is reported. A
time is that of CUDA graphs over arguments that have left the cache, replayed in turn. Rows are written as they are measured, and the same
command goes on where a run has ended. Figures of different runs are never compared.
"""
