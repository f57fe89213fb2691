"""Training: divergences, the teacher's text, and the one loop (distillation and plain cross-entropy alike)."""
