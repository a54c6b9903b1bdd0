"""The launcher, tried with a real tritonserver and throw-away models."""
