"""Decoding: the verify rule, plain and speculative generation."""
