"""The one interface every rollout engine has, and the plain values that cross it.

An engine owns its own copy of the weights, serves many concurrent `generate` calls, and is always in one of a few
states. It never reads the trainer's parameters: weights arrive as buckets of named tensors, and every output says
which version of them produced it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ppo_lib.errors import RolloutError
from ppo_lib.rollout.weights import WeightBucket

FinishReason = Literal["stop", "length", "abort"]
SLEEP_TAGS = ("weights", "kv_cache")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn.

    Log-probabilities always belong to the full distribution scaled by `temperature`, because that is what a trainer
    can recompute; `top_k` and `top_p` narrow what may be drawn and do not change them. Temperature 0 means greedy
    with log-probabilities at temperature 1.

    Args:
        temperature: Scale of the logits, at least 0.
        top_k: Draw among this many most likely tokens; -1 or 0 for all.
        top_p: Draw among the fewest most likely tokens that hold this mass, in (0, 1].
        max_tokens: Most tokens of the response; None for as many as the context leaves.
        stop: Strings that end the response; the token that completes one stays in it.
        stop_token_ids: Tokens that end the response beside the model's own; they stay in it.
        seed: Seed of this request's draws. None: derived from the request id.
        greedy: Take the most likely token whatever the temperature.
        ignore_eos: Do not stop at the model's own end-of-sequence tokens.
        logprobs: Return a log-probability per token.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    greedy: bool = False
    ignore_eos: bool = False
    logprobs: bool = True

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature >= 0, "at least 0"),
            "top_k": (self.top_k >= -1, "-1 or 0 (all tokens) or at least 1"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            "stop": (not isinstance(self.stop, str) and all(self.stop), "a sequence of non-empty strings"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise RolloutError(f"sampling parameter {name} is {getattr(self, name)!r}; it must be {expected}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken at every step."""
        return self.greedy or self.temperature == 0


@dataclass(frozen=True)
class Cohort:
    """A set of requests that an engine decodes as one: it starts when all have arrived, in the order they name.

    What an engine computes for a row depends on the rows beside it (in the last bits), so a run can be repeated
    bit for bit only if that neighbourhood does not depend on who arrived first.

    Args:
        id: Names the set; the same on all its requests.
        size: How many requests it has on this engine.
    """

    id: str
    size: int


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Args:
        request_id: Unique among the requests an engine holds.
        prompt_ids: The prompt's tokens, at least one.
        params: How to sample.
        order: (prompt row, session): the place of this request among the others of its cohort.
        cohort: The set it is decoded with; None joins whatever runs at the next step.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    order: tuple[int, int] = (0, 0)
    cohort: Cohort | None = None


@dataclass(frozen=True)
class TokenOutput:
    """What an engine made of a request.

    Args:
        token_ids: The response's tokens, the one that stopped it included.
        log_probs: One per token, or None where none were asked for.
        finish_reason: `stop` at a stop token or string, `length` at the limit, `abort` when called off.
        weight_version_min: Oldest version of the weights that a token came from.
        weight_version_max: Newest version of the weights that a token came from.
        stats: What the engine says of its work on this request, by metric name (`spec_accept_rate`).
    """

    token_ids: list[int]
    log_probs: list[float] | None
    finish_reason: FinishReason
    weight_version_min: int
    weight_version_max: int
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStatus:
    """What an engine is doing. `state` is one of `ready`, `asleep`, `updating`, `broken`, `stopped`."""

    state: str
    weight_version: int
    running: int
    waiting: int
    detail: dict[str, Any] = field(default_factory=dict)


class RolloutEngine(ABC):
    """Generates token ids from token ids, with weights that are replaced from outside.

    Every method may be awaited from any event loop; none blocks it. Versions count synchronisations: -1 is what the
    engine was built with, 0 the first set of weights that it was sent.
    """

    decodes_cohorts: ClassVar[bool] = False
    """Whether the engine waits for a whole cohort, so that it must be told in advance who comes to it."""

    opens_device_buckets: ClassVar[bool] = False
    """Whether `update_bucket` takes a `SharedBucket` too, and one from each GPU of the replica."""

    @abstractmethod
    async def generate(self, request: GenerationRequest, min_weight_version: int = -1) -> TokenOutput:
        """Continue a prompt.

        Raises:
            StaleWeightsError: The weights are older than `min_weight_version`.
            EngineAsleepError: The engine sleeps.
            RolloutError: The request does not fit, or the engine failed on it.
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Call off these requests (None: all); each still returns what it has. Returns how many were called off."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Stop decoding and make ready for new weights. Until `finish_update` no request is served."""

    @abstractmethod
    async def update_bucket(self, bucket: WeightBucket) -> None:
        """Take over one bucket of named tensors, after checking its checksum, names and shapes."""

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Check that every tensor arrived, and serve from now on as `version`."""

    @abstractmethod
    async def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Give up what the tags name (`weights`, `kv_cache`). Refused while requests run."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Take back what the tags name."""

    @abstractmethod
    async def status(self) -> EngineStatus:
        """State, weight version and load."""

    @abstractmethod
    async def shutdown(self) -> None:
        """Fail what is unfinished, free everything, end every thread and process of the engine."""


def check_prompt(request: GenerationRequest, context: int, vocab: int) -> None:
    """Refuse a prompt that an engine could not read.

    Args:
        request: What is asked for.
        context: Most tokens of prompt and response together.
        vocab: Size of the model's vocabulary.

    Raises:
        RolloutError: It is empty, too long, or holds what is no token.
    """
    prompt = request.prompt_ids
    name = f"request {request.request_id}"
    if not prompt:
        raise RolloutError(f"{name} has an empty prompt")
    if not all(isinstance(token, int) for token in prompt):
        raise RolloutError(f"{name} holds token ids that are no integers, such as {prompt[0]!r}")
    if len(prompt) >= context:
        raise RolloutError(
            f"{name} has a prompt of {len(prompt)} tokens; at most {context - 1} leave room for an answer "
            f"in the context of {context} (rollout.max_model_len, or the model's own limit)"
        )
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise RolloutError(
            f"{name} holds token ids from {min(prompt)} to {max(prompt)}; the model's vocabulary is 0 to {vocab - 1}"
        )


def known_tags(tags: Sequence[str]) -> set[str]:
    """The tags as a set. Raises `RolloutError` if one is not in `SLEEP_TAGS`."""
    unknown = sorted(set(tags) - set(SLEEP_TAGS))
    if unknown:
        raise RolloutError(f"unknown sleep tag {unknown[0]!r}; there are {', '.join(SLEEP_TAGS)}")
    return set(tags)
