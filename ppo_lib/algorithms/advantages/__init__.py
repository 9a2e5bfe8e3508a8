"""Advantage estimators, one file a family: keywords in, `(advantages, returns)` out, both (B, R) float32.

An outcome is the sum of a row's token rewards over its policy tokens. One rule for each edge, in every estimator:

- A token outside the response mask has advantage and return exactly 0, and nothing that stands there is read: neither
  NaN in the padding nor a reward on a tool token.
- A row without a policy token (fully masked, rejected, or an empty response) has advantage 0 and is left out of every
  statistic: its siblings get what they would get without it.
- Where the rollouts of a prompt are compared (an estimator that needs `uid`), a group with one such row left has
  nothing to be compared with, and a group whose outcomes are all equal has nothing to tell: their advantages are
  exactly 0, also where a batch mean is taken off the others.
- Over tokens with mask 0 inside a response (what a tool answered) returns are carried unchanged, undiscounted.
"""
