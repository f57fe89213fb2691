"""The kinds of students that `draftlab distill` trains, one module for each. The modules do not import torch."""
