"""Engine: the process with the model, and the protocol between it and its front in Triton."""
