"""Cutting a checkpoint to a shape: what matters (importance), what stays (keep), the cut itself."""
