"""Ensemble: a model of Triton that schedules streams, and calls the models of the stages.

The scheduling model is the service of the one-process server, with stand-ins for the stages in its
pipeline. Each stage, the flow and the vocoder, is a model of Triton in a process of its own.
docs/ensemble.md explains when this is useful.
"""
