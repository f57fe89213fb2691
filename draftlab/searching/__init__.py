"""Search for the fastest draft: shapes are cut, distilled, replayed, priced and measured."""
