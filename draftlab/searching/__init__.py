"""The search for the fastest draft: draft shapes are cut, distilled, replayed and measured."""
