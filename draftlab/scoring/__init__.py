"""Measure the speed and accuracy of drafts, in draftlab's engine or on servers."""
