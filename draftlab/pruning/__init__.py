"""Structured pruning: importance, what to keep, the cut, the refit."""
