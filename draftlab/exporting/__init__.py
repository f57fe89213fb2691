"""Export of drafts in the form that a server loads, with start script and model card, verified in that server."""
