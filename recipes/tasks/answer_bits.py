"""Results of local_gsm8k_answer and code_bits_per_byte: bits per byte over all answers, and the bits of each one."""

import math
from typing import Any


def process_results(doc: dict[str, Any], results: list[tuple[float, bool]]) -> dict[str, object]:
    """Return the log-likelihood with the bytes of an answer, for lm-eval to sum, and its bits."""
    log_likelihood, _ = results[0]
    return {
        "bits_per_byte": (log_likelihood, len(doc["answer"].encode())),
        "answer_bits": -log_likelihood / math.log(2),
    }
