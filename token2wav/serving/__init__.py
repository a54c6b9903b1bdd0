"""Serving of utterances: selects the chunks that run next, and computes them by the stages of the
model.
"""
