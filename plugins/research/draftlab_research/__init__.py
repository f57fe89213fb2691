"""A plug-in of draftlab: drafters and verify rules from papers (README.md)."""
