"""Measured speed and accuracy of drafts, in our engine or on servers."""
