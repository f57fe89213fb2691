"""The drafters themselves, which need torch. The modules one folder above declare their options."""
