"""Rehearsal of several servers behind the balancer."""
