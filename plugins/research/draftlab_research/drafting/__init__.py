"""The drafters, which need torch. Their options are declared in modules of draftlab_research that do not."""
