"""Target outputs on disk: tokens, log-probabilities, or both."""
