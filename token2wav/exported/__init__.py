"""Exported graphs and engines: their folder, and their runs in ONNX Runtime and TensorRT."""
