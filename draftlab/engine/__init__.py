"""Decoding: the verify rule, drafters, plain and speculative generation."""
