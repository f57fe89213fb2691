"""The reader of the package gguf, with a faster way to read arrays, and shared with transformers.

gguf's own reader calls numpy six times for each string of a vocabulary, and transformers opens the file anew in each of
its functions. A header of 150,000 tokens would take more than 10 s each time.
"""

import contextlib
import struct
from collections.abc import Container, Iterator
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType
from transformers.integrations import gguf as functions
from transformers.integrations.gguf import reader as module

MOST_ITEMS = 2_000_000  # of an array; the largest vocabularies have 300,000 tokens and 500,000 merges
TOKENS = "tokenizer.ggml.tokens"
# arrays of a tokenizer, from which no setting of the model is read
LONG = (TOKENS, "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")


class Reader(GGUFReader):
    """A reader whose fields are those of GGUFReader, except that a string has no part for its length.

    Raises:
        ValueError and other errors: The file is not GGUF, is damaged, or is big-endian.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Return the size of a value in bytes, its parts, the indices of the items among the parts, and the types."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        start = orig_offs + item.nbytes + count.nbytes
        size = int(count[0])
        kind = GGUFValueType(item[0])
        if size > MOST_ITEMS:
            raise ValueError(f"an array has {size:,} items")
        if kind == GGUFValueType.STRING:
            items, end = self._strings(start, size)
        elif kind == GGUFValueType.ARRAY:
            raise ValueError("an array has arrays as items")
        else:
            values = np.asarray(self._get(start, self.gguf_scalar_to_np[kind], size))
            if len(values) != size:
                raise ValueError("the file ends within an array")
            items = list(values.reshape(-1, 1))
            end = start + values.nbytes
        types = [GGUFValueType.ARRAY, kind] if items else [GGUFValueType.ARRAY]
        return end - orig_offs, [item, count, *items], list(range(2, 2 + size)), types

    def _strings(self, offset: int, count: int) -> tuple[list[np.ndarray], int]:
        """Return the bytes of `count` strings from an offset on, and the offset after them."""
        if self.byte_order == "S":
            raise ValueError("the file is big-endian; use a little-endian file")
        # slicing a memmap takes twenty times as long as slicing its array
        data = np.asarray(self.data)
        items = []
        length_of = struct.Struct("<Q").unpack_from
        buffer = data.data
        for _ in range(count):
            (length,) = length_of(buffer, offset)
            items.append(data[offset + 8 : offset + 8 + length])
            offset += 8 + length
        return items, offset

    @cached_property
    def values(self) -> dict[str, Any]:
        """The value of each key, as transformers' read_gguf_metadata returns it."""
        return {name: field.contents() for name, field in self.fields.items() if not name.startswith("GGUF.")}

    def metadata(self, string_arrays: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return what transformers' read_gguf_metadata returns: values, and names of tensors.

        string_arrays: Keys of the arrays of strings to return. Other arrays of strings are replaced by their lengths.
        """
        values = {
            name: len(value)
            if isinstance(value, list) and value and isinstance(value[0], str) and name not in string_arrays
            else value
            for name, value in self.values.items()
        }
        return values, tuple(tensor.name for tensor in self.tensors)

    def without_vocabulary(self) -> Any:
        """Return an object with the fields and tensors of this reader, in which every token is the number 0.

        transformers reads settings of the model from it, and counts the tokens.
        """
        fields = {name: field for name, field in self.fields.items() if name not in LONG}
        tokens = self.fields[TOKENS]
        fields[TOKENS] = tokens._replace(parts=[(0,)], data=[0] * len(tokens.data), types=[GGUFValueType.UINT32])
        return SimpleNamespace(fields=fields, tensors=self.tensors)

    @contextlib.contextmanager
    def given_to_transformers(self) -> Iterator[None]:
        """Within the block, give transformers this reader in place of each that it would open.

        Its functions take a path and open the file themselves, and have no parameter for a reader. Their table of
        names, which they make once per module of a model, is made once, too.
        """

        def metadata(_path: str, string_arrays: Container[str] = ()) -> Any:
            return self.metadata(string_arrays)

        opened = self.without_vocabulary()
        replaced: list[tuple[Any, str, Any]] = [
            (gguf, "GGUFReader", lambda _path: opened),
            (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
            (functions, "read_gguf_metadata", metadata),
            (module, "read_gguf_metadata", metadata),
        ]
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
        try:
            for owner, name, value in replaced:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in originals:
                setattr(owner, name, value)
