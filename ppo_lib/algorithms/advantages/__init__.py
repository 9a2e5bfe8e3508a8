"""Advantage estimators, one file a family: keywords in, `(advantages, returns)` out, both (B, R) float32.

One rule for each edge, in every estimator:

- A token outside the response mask has advantage and return exactly 0, and nothing that stands there is read: neither
  NaN in the padding nor a reward on a tool token.
- A row without a policy token (fully masked, rejected, or an empty response) has advantage 0 and is left out of every
  statistic: its siblings get what they would get without it.
- A group with one such row left has nothing to be compared with: its advantages are 0.
- A group whose scores are all equal has advantages exactly 0.
"""
