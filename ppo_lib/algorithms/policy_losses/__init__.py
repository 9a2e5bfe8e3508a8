"""Policy losses, one file each: (old_log_prob, log_prob, advantages, response_mask, ...) -> (loss, metrics).

Both results are contributions to a mini-batch: divided by its denominators, they add up over micro-batches and ranks.
"""
