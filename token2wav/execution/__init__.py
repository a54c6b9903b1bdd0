"""Execution of networks on batches of blocks: on torch, on Triton-language kernels, as CUDA graphs,
and as exported graphs.
"""
