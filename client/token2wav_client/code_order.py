"""Order of the codes of a codec with codebooks of different rates, such as SNAC."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from token2wav_client.errors import TokenError
from token2wav_client.tokens import as_tokens


def flatten_codebooks(codebooks: Sequence[npt.ArrayLike]) -> npt.NDArray[np.int32]:
    """Joins the codes of several codebooks to tokens, in the order in which language models emit
    them.

    A code comes after the coarser code above it, and before the next code of the same codebook. So
    a token of three codebooks a, b and c with 1, 2 and 4 codes is a0, b0, c0, c1, b1, c2, c3.
    Raises TokenError if codes are no integers of at least 0, or their counts do not fit each other.

    Args:
        codebooks: codes of each codebook, (n,), the coarsest first. For SNAC at 24 kHz they have n,
            2 n and 4 n codes. An axis of length 1 in front is dropped.

    Returns:
        (n, codes of a token) int32.
    """
    rows = [as_tokens(np.atleast_1d(np.squeeze(np.asarray(codes)))) for codes in codebooks]
    if not rows or any(row.ndim != 1 for row in rows):
        raise TokenError("tokens: expected a list of codes for each codebook")
    counts = [len(row) for row in rows]
    tokens = counts[0]
    rates = [count // tokens if tokens else 1 for count in counts]  # codes of each token
    divisible = counts == [tokens * rate for rate in rates]
    if not divisible or any(not fine or fine % coarse for coarse, fine in pairwise(rates)):
        raise TokenError(
            f"tokens: {counts} codes in the codebooks; each number must be a multiple of the "
            "number before it"
        )
    finest = rates[-1]
    columns = [
        row.reshape(tokens, -1)[:, step * rate // finest]
        for step in range(finest)
        for row, rate in zip(rows, rates, strict=True)
        if step * rate % finest == 0
    ]
    return np.stack(columns, axis=1).astype(np.int32)
