"""The drafters, with torch. The modules one folder above declare the options."""
