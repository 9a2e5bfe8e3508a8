"""Policy losses, one file a family: (old_log_prob, log_prob, advantages, response_mask, ...) -> (loss, metrics).

What holds for all of them:

- Both results are contributions to a mini-batch: divided by its denominators, they add up over micro-batches and
  ranks. Every loss obeys every `loss_agg_mode`; one that is worked out for a whole sequence gives its value to each
  token of it, so that `seq-mean-token-mean` is its mean over sequences.
- `old_log_prob` is where the ratio is 1 and gets no gradient: the actor before its update or, in bypass mode, the
  policy that sampled the response. A log ratio is clamped once, to +-`LOG_RATIO_CLAMP`.
- `rollout_is_weights`, where given, multiply the loss of each token.
- Off the mask nothing is read, and the gradient there is exactly 0.
"""
