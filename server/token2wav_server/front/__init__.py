"""Fronts: the programs inside tritonserver that forward requests to the engine."""
