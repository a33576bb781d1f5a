"""The operators in Triton, one kernel family per file; contracts and references stay in `kernels/<op>.py`.

Importing a file here imports Triton. Every kernel also runs in Triton's interpreter (CPU tensors, `TRITON_INTERPRET=1`)
and compiles ahead of time for cards that are not there (`aot.py`).
"""
