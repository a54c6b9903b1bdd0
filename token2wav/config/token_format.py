"""Format of the tokens of a model: numbers, codes of several codebooks, or latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.config.arrays import float_array, shape_problem, token_array
from token2wav.errors import InputError

NO_TOKEN = -1  # in the place of a token that has not arrived
NO_CODE = -1  # code of a codebook that a stream does not send
LATENTS_FP16 = "latents_fp16"  # name of latents of half precision in requests
LATENT_BOUND = 1e4  # largest magnitude; the numbers inside of a network stay finite


@dataclass(frozen=True)
class TokenFormat:
    """Format of the tokens of a model. One of its constructors makes it, for example
    `TokenFormat.numbers(6561)`.

    Attributes:
        shape: shape of one token: () for a number, (codebooks,) for codes, (size,) for a latent.
        codebook_sizes: number of different codes in each codebook. A token that is a number has
            one codebook. A latent has none.
        fewer_codebooks: whether a stream may send only the first codes of each token. Its first
            tokens decide how many.
    """

    shape: tuple[int, ...]
    codebook_sizes: tuple[int, ...]
    fewer_codebooks: bool = False

    @classmethod
    def numbers(cls, vocabulary: int) -> TokenFormat:
        """Tokens that are numbers from 0 to `vocabulary` - 1."""
        return cls((), (vocabulary,))

    @classmethod
    def codes(cls, codebooks: int, size: int, *, fewer: bool = False) -> TokenFormat:
        """Tokens of one code from each codebook. All codebooks have the same size. If `fewer`, a
        stream may send only the first codes of each token.
        """
        return cls((codebooks,), (size,) * codebooks, fewer)

    @classmethod
    def uneven_codes(cls, sizes: Sequence[int]) -> TokenFormat:
        """Tokens of one code from each codebook. The codebooks have different sizes."""
        return cls((len(sizes),), tuple(sizes))

    @classmethod
    def latents(cls, size: int) -> TokenFormat:
        """Tokens that are latents: vectors of `size` float32 numbers."""
        return cls((size,), ())

    @property
    def are_latents(self) -> bool:
        return not self.codebook_sizes

    @property
    def codebooks(self) -> int:
        """Codes of a token; 0 if tokens are numbers or latents."""
        return len(self.codebook_sizes) if self.shape else 0

    @property
    def field(self) -> str:
        """Name of the tokens in requests and in messages: `tokens`, or `latents`."""
        return "latents" if self.are_latents else "tokens"

    @property
    def dtype(self) -> type[np.int32 | np.float32]:
        return np.float32 if self.are_latents else np.int32

    def zeros(self, count: int) -> NDArray[Any]:
        """Returns `count` tokens of zeros, (count, *shape)."""
        return np.zeros((count, *self.shape), self.dtype)

    def draw(self, count: int, random: np.random.Generator) -> NDArray[Any]:
        """Draws tokens (count, *shape): codes, or latents of a normal distribution."""
        size = (count, *self.shape)
        if self.are_latents:
            return random.standard_normal(size).astype(self.dtype)
        return random.integers(0, self.codebook_sizes, size).astype(self.dtype)

    def checked(self, tokens: ArrayLike) -> NDArray[Any]:
        """Converts the tokens of a call, and checks them. No later step checks them again.

        Args:
            tokens: (n,) integers, or (n, codebooks); or (n, size) numbers if tokens are latents.

        Returns:
            (n, *shape) int32, with `NO_CODE` in the codebooks that a stream does not send; or
            float32 latents.

        Raises:
            InputError: the tokens have another shape, are not integers, or are outside the
                vocabulary; or the latents have another shape, or contain NaN, infinity, or a
                number of a larger magnitude than `LATENT_BOUND`.
        """
        if self.are_latents:
            return self._checked_latents(tokens)
        if self.fewer_codebooks:
            return self._padded_codes(tokens)
        array = token_array("tokens", tokens, self.shape)
        self._check_codes("tokens", array)
        return array

    def check_prompt(self, tokens: NDArray[np.int32]) -> None:
        """Raises InputError if prompt tokens have another shape or are outside the vocabulary."""
        if tokens.shape[1:] != self.shape:
            raise InputError("prompt_tokens", shape_problem(tokens.shape, self.shape))
        self._check_codes("prompt_tokens", tokens)

    def _checked_latents(self, latents: ArrayLike) -> NDArray[np.float32]:
        array, [size] = float_array("latents", latents, None, LATENT_BOUND), self.shape
        if array.shape == (0,):
            return array.reshape(0, size)
        if array.ndim != 2 or array.shape[1] != size:
            raise InputError("latents", f"shape {array.shape}, expected (latents, {size})")
        return array

    def _padded_codes(self, tokens: ArrayLike) -> NDArray[np.int32]:
        """Checks tokens of the first codebooks, and adds `NO_CODE` for the others."""
        array, most = token_array("tokens", tokens, None), self.codebooks
        if not array.size and array.ndim == 1:
            array = array.reshape(0, most)
        if array.ndim != 2 or not 1 <= array.shape[1] <= most:
            raise InputError(
                "tokens",
                f"shape {array.shape}, expected (tokens, codebooks) with 1 to {most} codebooks",
            )
        self._check_codes("tokens", array)
        if array.shape[1] == most:
            return array
        absent = most - array.shape[1]
        return np.pad(array, ((0, 0), (0, absent)), constant_values=NO_CODE)

    def _check_codes(self, field: str, codes: NDArray[np.int32]) -> None:
        sizes = self.codebook_sizes[: codes.shape[1]] if self.shape else self.codebook_sizes
        outside = (codes < 0) | (codes >= np.array(sizes))
        if outside.any():
            index = tuple(np.argwhere(outside)[0].tolist())
            label = f"{index[0]}, codebook {index[1]}," if self.shape else str(index[0])
            size = sizes[index[1]] if self.shape else sizes[0]
            raise InputError(
                field,
                f"{codes[index]} at index {label} is outside the vocabulary 0 to {size - 1}",
                index[0],
            )
