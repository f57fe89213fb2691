"""EAGLE-3 heads (Li et al. 2025, 2503.01840): a layer drafts from the target's states, then from its own."""
