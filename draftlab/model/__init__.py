"""Models: shapes, checkpoints, tokenizers and the decoders that run them."""
