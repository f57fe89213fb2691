"""Drafters and verify rules of papers that no server runs yet, as a plug-in of draftlab (README.md)."""
