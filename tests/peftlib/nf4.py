"""NF4 in numpy, from the paper's numbers."""

import numpy as np

# Appendix E of Dettmers et al., QLoRA, 2023.
LEVELS = np.array([
  -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
  -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
  0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
  0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
  0.7229568362236023, 1.0,
])  # fmt: skip


def rounded(tiles: np.ndarray, axis: int) -> np.ndarray:
  """Values at the nearest levels of the largest magnitude along `axis`."""
  scale = np.abs(tiles).max(axis=axis, keepdims=True)
  nearest = np.abs((tiles / scale)[..., None] - LEVELS).argmin(-1)
  return LEVELS[nearest] * scale
