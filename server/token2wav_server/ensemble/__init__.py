"""Ensemble of three Triton models: accumulator, flow and vocoder.

The accumulator admits streams and cuts their tokens into chunks, the flow turns tokens into mel,
and the vocoder turns mel into audio and reports to the accumulator. Each model has a process of its
own. docs/ensemble.md explains when this is useful.
"""
