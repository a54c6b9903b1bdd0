"""Serving of requests: selects the chunk that each request runs next, and computes it by the stages
of the model.
"""
