"""Serving of streams: what stands between a request and the engines."""
