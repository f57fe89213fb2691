"""Training of drafts: losses, training text, and one loop for distillation and for plain cross-entropy."""
