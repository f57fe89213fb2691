"""DFlash heads (2602.06036), which draft a block of tokens in one pass from the target's states."""
