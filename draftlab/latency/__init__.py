"""Latency of passes: measurements, models, and the speed-ups predicted from them."""
