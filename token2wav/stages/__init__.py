"""Stages of a model, from tokens to mel and from mel to audio, with the states of their streams."""
