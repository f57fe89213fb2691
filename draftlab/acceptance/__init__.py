"""Acceptance of drafts, computed from log-probabilities without decoding."""
