"""Models: shapes and families of shapes, checkpoints, tokenizers, and decoders that run them."""

from typing import Literal

# what runs a decoder's passes: torch, compiled C++ or CUDA graphs
Mode = Literal["eager", "native", "graphs"]
