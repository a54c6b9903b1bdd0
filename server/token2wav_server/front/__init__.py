"""Fronts: models of Triton that forward requests to the engine, the process with the model."""
