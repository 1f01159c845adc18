"""Reads tool configuration files in verl's format, as data; `loading.py` makes the tools.

tools:
- class_name: verl.tools.mcp_search_tool.MCPSearchTool     # or rayapp.tools.…, or a file: my_tools/dice.py:Dice
  config: {type: mcp, rate_limit: 120, timeout: 120}
  mcp: {mcp_servers_config_path: mcp_server.json, tool_selected_list: [run_code_once]}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rayapp.core.errors import ConfigError
from rayapp.core.validation import explain

_VARIABLE = re.compile(r"\$\{(\w+)\}")
Section = TypeVar("Section", bound=BaseModel)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class McpSection(_Frozen):
    """Section `mcp` of an entry: the MCP servers, and the tools to take from them."""

    mcp_servers_config_path: str
    """JSON with `mcpServers` and `#` comments, looked up in the tool file's folder, then in the working directory."""
    tool_selected_list: tuple[str, ...] = ()
    """Names of the tools that the policy gets; empty: all tools."""


class ToolEntry(_Frozen):
    """One entry of the list `tools`."""

    class_name: str
    config: dict[str, Any] = Field(default_factory=dict)
    mcp: McpSection | None = None
    tool_schema: dict[str, Any] | None = None


class McpToolConfig(_Frozen):
    """Section `config` of an entry with `type: mcp`."""

    type: Literal["mcp"] = "mcp"
    rate_limit: float = Field(120.0, gt=0)
    """Maximum number of calls per second of one worker, and of calls that may start together after a pause."""
    timeout: float = Field(30.0, gt=0)
    """Deadline of one call, in seconds after it is sent."""
    max_wait: float = Field(300.0, gt=0)
    """Maximum seconds for which a call waits for the rate limit."""
    reconnect_timeout: float = Field(30.0, gt=0)
    """Seconds for which a worker tries to reach a lost server again, before trajectories that need it fail."""
    session: Literal["worker", "trajectory"] = "worker"
    """`worker`: all trajectories of a worker share one session. `trajectory`: each has its own, for stateful tools."""


class McpServer(_Frozen):
    """One entry of the object `mcpServers`."""

    url: str = Field(min_length=1)
    """URL of the server (streamable HTTP), e.g. http://127.0.0.1:8082/mcp."""
    api_key: str = ""
    """Key that is sent in the header `api_key_header`. ${VARIABLE} stands for the value of an environment variable."""
    api_key_env: str = ""
    """Name of the environment variable that holds the key; used in place of `api_key`."""
    api_key_header: str = "E2B-API-KEY"
    auth_token: str = ""
    """Token that is sent as `Authorization: Bearer …`; it may contain ${VARIABLE}."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Further headers; their values may contain ${VARIABLE}."""

    def all_headers(self, environ: Mapping[str, str], *, where: str) -> dict[str, str]:
        """Return all headers of a request to this server. ConfigError: a variable is not set."""
        key = self.api_key or (f"${{{self.api_key_env}}}" if self.api_key_env else "")
        found = dict(self.headers)
        if key:
            found[self.api_key_header] = f"Bearer {key}" if self.api_key_header.lower() == "authorization" else key
        if self.auth_token:
            found["Authorization"] = f"Bearer {self.auth_token}"
        return {name: expand(value, environ, where=f"{where}: {name}") for name, value in found.items()}


def expand(text: str, environ: Mapping[str, str], *, where: str) -> str:
    """Return a text with each ${VARIABLE} replaced by the variable's value. ConfigError: one is not set."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if not environ.get(name):
            raise ConfigError(f"{where} needs the environment variable {name}, which is not set or is empty")
        return environ[name]

    return _VARIABLE.sub(value, text)


def read_tool_file(path: str | Path) -> tuple[ToolEntry, ...]:
    path = Path(path)
    data = _load(path, "tool file")
    entries = data.get("tools") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(f"tool file {path} has no list `tools` at the top level (docs/tools.md)")
    return tuple(parse(entry, ToolEntry, where=f"tool file {path}: tools[{i}]") for i, entry in enumerate(entries))


def read_mcp_servers(section: McpSection, beside: Path) -> dict[str, McpServer]:
    """Return the servers of the JSON file `section.mcp_servers_config_path`, by name."""
    own = Path(section.mcp_servers_config_path)
    path = beside / own if (beside / own).exists() else own
    data = _load(path, "mcp_servers_config_path")
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(
            f'MCP server file {path} must have the form {{"mcpServers": {{"name": {{"url": "http://…/mcp"}}}}}}'
        )
    return {str(name): parse(entry, McpServer, where=f"{path}: {name}") for name, entry in servers.items()}


def parse(data: object, section: type[Section], *, where: str) -> Section:
    """Return a section of a file as its pydantic model. A ConfigError names the key and the allowed values."""
    try:
        return section.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, section)}") from error


def _load(path: Path, what: str) -> Any:
    try:
        # JSON files are also read as YAML, a superset of JSON, because existing files contain comments.
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} {path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path} is neither YAML nor JSON: {error}") from error
