"""Arrays of a call: their conversion to int32 or float32, and the checks of their shapes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from token2wav.errors import InputError, one_line


def token_array(
    field: str, tokens: ArrayLike, token_shape: tuple[int, ...] | None = ()
) -> NDArray[np.int32]:
    """Converts the tokens of a call to (n, *token_shape) int32. Raises InputError if the array has
    another shape, or its values are not integers, or are out of the range of int32.

    Args:
        field: name of the argument for messages.
        tokens: array to convert; an empty one-dimensional array fits every token shape.
        token_shape: shape of one token: () for a number, (codebooks,) for several codes; None
            accepts numbers, and codes of any number of codebooks.
    """
    array = _array(field, tokens)
    if token_shape is None:
        if array.ndim not in (1, 2):
            raise InputError(field, f"shape {array.shape}, expected one or two dimensions")
        token_shape = array.shape[1:]
    if not array.ndim or (array.shape[1:] != token_shape and (array.size or array.ndim != 1)):
        raise InputError(field, shape_problem(array.shape, token_shape))
    if not array.size:
        return np.zeros((0, *token_shape), np.int32)
    # NumPy keeps integers of more than 64 bits as Python objects.
    beyond_64_bits = array.dtype == object and all(type(value) is int for value in array.flat)
    if not np.issubdtype(array.dtype, np.integer) and not beyond_64_bits:
        raise InputError(field, f"type {array.dtype}, expected integers")
    if array.dtype != np.int32:
        limits, low, high = np.iinfo(np.int32), int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            # Python refuses to print integers of thousands of digits.
            printable = max(-low, high) < 10**20
            value_range = f"; found {low} to {high}" if printable else ""
            raise InputError(field, f"values do not fit 32 bits{value_range}")
    return array.astype(np.int32)


def shape_problem(shape: tuple[int, ...], token_shape: tuple[int, ...]) -> str:
    """Returns the message for tokens of another shape than (n, *token_shape)."""
    expected = "one dimension"
    if token_shape:
        expected = f"(tokens, {token_shape[0]}), {token_shape[0]} codes for each"
    return f"shape {shape}, expected {expected}"


def float_array(
    field: str, values: ArrayLike, dimensions: int | None, bound: float = np.inf
) -> NDArray[np.float32]:
    """Copies an array to float32. Raises InputError if its values are not real numbers, or one of
    the checks fails.

    Args:
        field: name of the argument for messages.
        dimensions: required number of dimensions; None for any.
        bound: largest magnitude of a value; NaN and infinity are never allowed.
    """
    numbers = _array(field, values)
    if numbers.dtype.kind not in "fiu" and numbers.dtype.name != "bfloat16":
        raise InputError(field, f"type {numbers.dtype}, expected real numbers")
    with np.errstate(over="ignore"):
        array = numbers.astype(np.float32)
    if dimensions is not None and array.ndim != dimensions:
        raise InputError(
            field, f"shape {array.shape}, expected {dimensions} dimension{'s' * (dimensions > 1)}"
        )
    if not np.isfinite(array).all():
        raise InputError(field, "holds NaN or infinite values")
    if array.size and max(-array.min(), array.max()) > bound:
        index = tuple(np.argwhere(np.abs(array) > bound)[0].tolist())
        label = ", ".join(map(str, index))
        raise InputError(
            field, f"{array[index]:g} at index {label} is outside {-bound:g} to {bound:g}"
        )
    return array


def _array(field: str, values: ArrayLike) -> NDArray[Any]:
    """Converts an argument to an array of any type."""
    if isinstance(values, np.ndarray):
        return values
    # NumPy has no bfloat16. Its values are the same in float32.
    if str(getattr(values, "dtype", "")) == "torch.bfloat16":
        values = cast(Any, values).float()
    try:
        return np.asarray(values)
    # Raised for ragged lists, and for torch tensors that are not on the CPU.
    except (TypeError, ValueError, RuntimeError) as error:
        uneven = "inhomogeneous" in str(error)  # NumPy's word for rows of different lengths
        problem = "rows of different lengths" if uneven else f"not an array: {one_line(error)}"
        raise InputError(field, problem) from error
