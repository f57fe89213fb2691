"""Models: shapes and families of shapes, checkpoints, tokenizers, and decoders that run them."""

from typing import Literal

# a decoder's passes run by torch, compiled C++, CUDA graphs
Mode = Literal["eager", "native", "graphs"]
