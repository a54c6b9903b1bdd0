"""Families of models: how published folders become stages."""
