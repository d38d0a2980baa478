"""The worker: the process in which the code of cells runs.

Run as ``python -P -m rlm_kernel.repl.worker 3`` with the link at that file
descriptor. Everything here shares a process with user code and is trusted
with nothing: the kernel checks all that comes up the link.
"""
