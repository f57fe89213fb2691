"""Measuring a draft: accuracy by lm-eval, acceptance, latency and throughput in our own engine."""
