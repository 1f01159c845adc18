"""The loops a data row may ask for by its `agent_name`, as in verl: with tools over several turns, or one answer.

    tool_agent           the policy reads the tools, calls them, and speaks again
    single_turn_agent    the policy reads no tools and speaks once; what looks like a call is its answer

Another name is a plug-in's (`rayapp.agents`): it is called with the process's tool agent, whose chat format, tools,
parser and limits it may use, and gives an object with the same `run`.

Made once per rollout worker. Rows say nothing else about how they are played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rayapp.config.agent import AGENTS
from rayapp.core.errors import ConfigError, InputError
from rayapp.core.names.plugins import is_plugin, load_plugin
from rayapp.core.protocols import RolloutEngine
from rayapp.core.types import SamplingParams
from rayapp.rollout.agent.episode import AgentPrompt, Episode
from rayapp.rollout.agent.loop import AgentLoop
from rayapp.tools.calls import RawCall
from rayapp.tools.toolset import ToolSet

TOOL_AGENT, SINGLE_TURN_AGENT = AGENTS


class Player(Protocol):
    """Plays episodes: `AgentLoop`, or what a plug-in makes of one."""

    async def run(
        self, prompt: AgentPrompt, *, engine: RolloutEngine, sampling: SamplingParams, request_id: str
    ) -> Episode:
        """One episode; see `AgentLoop.run`."""
        ...


def player_of(agent_name: str, tool_agent: AgentLoop) -> Player:
    """Who plays with this loop's tools: the loop itself, or a plug-in.

    Raises:
        ConfigError: the plug-in can't be made.
    """
    if agent_name == TOOL_AGENT:
        return tool_agent
    try:
        player: Player = load_plugin("agents", agent_name)(tool_agent)
    except ConfigError:
        raise
    except Exception as error:  # boundary: a plug-in is foreign code
        raise ConfigError(f"plug-in {agent_name} can't be made: {type(error).__name__}: {error}") from error
    if not callable(getattr(player, "run", None)):
        raise ConfigError(f"plug-in {agent_name}: what it makes has no `run` (rayapp/rollout/agent/loops.py)")
    return player


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
    _players: dict[str, Player] = field(default_factory=dict, compare=False)
    """Plug-ins by name, made when a row first asks for one."""

    def of(self, agent_name: str) -> AgentLoop:
        """The loop of a row: its chat format, and its tools. A plug-in has those of the tool agent.

        Raises:
            InputError: there is none of that name.
        """
        check_agent_name(agent_name)
        return self.single_turn_agent if (agent_name or self.default) == SINGLE_TURN_AGENT else self.tool_agent

    def player(self, agent_name: str) -> Player:
        """Who plays a row. Raises as `of`, or ConfigError as `player_of`."""
        loop, name = self.of(agent_name), agent_name or self.default
        if name in AGENTS:
            return loop
        if name not in self._players:
            self._players[name] = player_of(name, loop)
        return self._players[name]

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
    if agent_name and agent_name not in AGENTS and not is_plugin("agents", agent_name):
        at = f"{where}: " if where else ""
        raise InputError(
            f"{at}agent_name {agent_name!r} is no agent loop here; there are {' and '.join(AGENTS)}. Tools of your own "
            "go into agent.tool_file (docs/tools.md)."
        )
