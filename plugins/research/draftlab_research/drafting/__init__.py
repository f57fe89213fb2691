"""The drafters themselves, with torch; the modules above have their options."""
