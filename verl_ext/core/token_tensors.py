"""Tensors `[B, L]` of verl with one value per token: sum them to numbers per row, and write numbers over a mask."""

import numpy as np
import torch

from verl_ext.core.groups import Array, Index
from verl_ext.errors import DataError


def float_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as floats in new memory. torch is very slow at multiplying verl's int64 masks by floats."""
    float_type = dtype if dtype.is_floating_point else torch.float32
    return mask.to(float_type, copy=True).detach()


def scores(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """Return `[B]` the sum of the token-level scores over the whole response.

    Finite values outside the mask count, because a multi-turn response may have its score on a token that is not
    trained on. Values outside the mask that are not finite are ignored.
    """
    token_level = token_level.detach()
    total = row_sums(token_level)
    not_finite = ~np.isfinite(total)
    if not_finite.any():
        total[not_finite] = _sums_of_valid(token_level[not_finite], mask[not_finite])
    return total


def _sums_of_valid(token_level: torch.Tensor, mask: torch.Tensor) -> Array:
    """Return the sum of the valid values of each row, which are those that are inside the mask or finite."""
    values = token_level.double()
    is_valid = mask.bool() | torch.isfinite(values)
    valid_values = torch.where(is_valid, values, 0)
    sums = valid_values.sum(dim=-1)
    # The sum of inf with -inf or NaN is NaN, which would mean "not scored". Report inf instead.
    has_infinity = torch.isinf(valid_values).any(dim=-1)
    is_wrong = has_infinity & torch.isnan(sums)
    return torch.where(is_wrong, torch.inf, sums).cpu().numpy()


def dense(values: torch.Tensor) -> torch.Tensor:
    """Return a field with one value per token, nested or padded, as a tensor padded with 0."""
    return values.to_padded_tensor(0) if values.is_nested else values


def row_sums(values: torch.Tensor) -> Array:
    """Return `[B]` the sum of each row, which for a float mask is the number of tokens."""
    is_narrow = values.dtype.itemsize < 4  # bfloat16 counts exactly only up to 256
    sums = values.sum(dim=-1, dtype=torch.float32 if is_narrow else None)
    return sums.cpu().numpy().astype(np.float64)


def write_over_mask(values: Array, mask: torch.Tensor, lengths: Index | None = None) -> torch.Tensor:
    """Write each row's value over a float mask `[B, L]`, in place: the value inside the mask, exactly 0 outside.

    With `lengths` each value belongs to a span of that many tokens of the flattened mask.
    """
    magnitudes = np.abs(values)
    if (magnitudes > torch.finfo(mask.dtype).max).any():
        largest = values[magnitudes.argmax()]
        raise DataError(
            f"An advantage of {largest:g} is too large for {mask.dtype}. Set smaller "
            "algorithm.rewards.weights, or return smaller rewards."
        )
    if mask.dtype != torch.float64:
        values = values.astype(np.float32)
    # `[B, 1]`, which torch broadcasts to the tokens of a row, or with `lengths` `[B, L]`.
    per_token = values[:, None] if lengths is None else values.repeat(lengths).reshape(mask.shape)
    factors = torch.from_numpy(per_token).to(mask)
    # Adding 0 turns -0 (-0.5 * 0) into 0. One row of zeros is faster than a scalar or another pass.
    zeros = mask.new_zeros(1, mask.shape[1])
    return torch.addcmul(zeros, mask, factors, out=mask)
