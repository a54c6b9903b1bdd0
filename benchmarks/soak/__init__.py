"""Soaks of a server and of a gateway among misbehaving clients."""
