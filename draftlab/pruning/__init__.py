"""Structured pruning: score the source's weights, choose what to keep, cut, and refit the draft to the source."""
