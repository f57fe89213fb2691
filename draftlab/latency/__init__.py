"""Latency of passes: measured, modelled, and turned into predicted speed-ups."""
