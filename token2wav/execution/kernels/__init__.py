"""Triton-language kernels for the flow on NVIDIA GPUs.

Without a GPU they run in Triton's interpreter, to be tested.
"""
