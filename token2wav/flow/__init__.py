"""Tokens to mel: conditioning, DiT estimator, ODE solver."""
