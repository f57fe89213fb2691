"""The drafters, which need torch. The modules of draftlab_research declare their options."""
