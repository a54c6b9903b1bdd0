"""Serving of requests: it decides which chunk of whom runs next, and takes it through flow and
vocoder.
"""
