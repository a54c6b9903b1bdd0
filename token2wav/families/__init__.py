"""Families of models: a package for each published format, and the registry that finds them."""
