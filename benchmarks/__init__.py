"""Scripts behind every performance claim: python -m benchmarks.NAME prints one JSON object on its last line."""
