"""Engines that run the networks for streams: one protocol, several implementations."""
