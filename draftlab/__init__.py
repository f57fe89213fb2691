"""Design, prune, distil and score draft models for speculative decoding."""

__version__ = "0.1.0"
