"""The loops a data row may ask for by its `agent_name`, as in verl: with tools over several turns, or one answer.

    tool_agent           the policy reads the tools, calls them, and speaks again
    single_turn_agent    the policy reads no tools and speaks once; what looks like a call is its answer

Made once per rollout worker. Rows say nothing else about how they are played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayapp.core.errors import InputError
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.tools.calls import RawCall
from rayapp.tools.toolset import ToolSet

TOOL_AGENT, SINGLE_TURN_AGENT = "tool_agent", "single_turn_agent"
EXTERNAL_AGENT = "external_agent"
"""No loop of ours: `rayapp.rollout.external` plays, for all rows and tasks of a source."""
AGENTS = (TOOL_AGENT, SINGLE_TURN_AGENT)


class NoCalls:
    """A parser that finds no calls."""

    def parse(self, text: str) -> tuple[RawCall, ...]:
        return ()

    def words(self, text: str) -> str:
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLoops:
    """See the module; make one with `agent_loops`."""

    tool_agent: AgentLoop
    single_turn_agent: AgentLoop
    default: str = TOOL_AGENT
    """For rows that name none."""

    def of(self, agent_name: str) -> AgentLoop:
        """The loop of a row.

        Raises:
            InputError: there is none of that name.
        """
        check_agent_name(agent_name)
        return self.single_turn_agent if (agent_name or self.default) == SINGLE_TURN_AGENT else self.tool_agent

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]], agent_name: str = "") -> list[int]:
        """What the policy reads of a row: only the tool agent's prompts tell of tools."""
        return self.of(agent_name).chat.prompt_ids(messages)

    async def close(self) -> None:
        """End what the tools hold."""
        await self.tool_agent.tools.close()


def agent_loops(tool_agent: AgentLoop, default: str = TOOL_AGENT) -> AgentLoops:
    """Both loops: the one given, and the same without tools and turns."""
    single = AgentLoop(
        chat=tool_agent.chat.without_tools(),
        parser=NoCalls(),
        tools=ToolSet(),
        limits=replace(tool_agent.limits, max_assistant_turns=1),
    )
    return AgentLoops(tool_agent=tool_agent, single_turn_agent=single, default=default)


def check_agent_name(agent_name: str, where: str = "") -> None:
    """Raises InputError for a name that is no loop's."""
    if agent_name and agent_name not in AGENTS:
        at = f"{where}: " if where else ""
        raise InputError(
            f"{at}agent_name {agent_name!r} is no agent loop here; there are {' and '.join(AGENTS)}. Tools of your own "
            "go into agent.tool_file (docs/tools.md)."
        )
