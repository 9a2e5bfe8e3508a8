"""One prompt, one response."""

from __future__ import annotations

import time

from ppo_lib.rollout.agent_loop.base import AgentLoopBase, AgentLoopOutput, AgentSample, register_agent_loop


@register_agent_loop("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Continues the prompt once; every token of the response is the policy's."""

    async def run(self, sample: AgentSample) -> AgentLoopOutput:
        """See `AgentLoopBase.run`."""
        begin = time.monotonic()
        output = await self.generate(sample, sample.prompt_ids)
        return AgentLoopOutput(
            index=sample.index,
            uid=sample.uid,
            session=sample.session,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            log_probs=output.log_probs,
            num_turns=2,
            finish_reason=output.finish_reason,
            weight_version_min=output.weight_version_min,
            weight_version_max=output.weight_version_max,
            timing={"generate_sequences": time.monotonic() - begin},
            stats=output.stats,
        )
