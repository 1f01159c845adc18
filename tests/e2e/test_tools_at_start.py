"""Tools whose service is not there: the run says so before its first step, through all of its processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayapp.config.config import Config
from rayapp.config.sections import BudgetSection
from rayapp.core.errors import ConfigError
from rayapp.driver import budget, loop
from rayapp.driver.budget import read_costs
from rayapp.driver.cluster import open_cluster
from support.stand_ins import stand_ins
from support.whole_runs import write_rows

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
NOWHERE = "http://127.0.0.1:9/mcp"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, standing_ray: Any) -> Config:
    """A run on one data row, whose tool's server is down."""
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"own": {"url": NOWHERE}}}))
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", "reconnect_timeout": 0.5},
        "mcp": {"mcp_servers_config_path": "servers.json", "tool_selected_list": ["run_code_once"]},
    }
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    return Config.model_validate(
        {
            "run": {"name": "no-tools", "output_dir": str(tmp_path)},
            "model": {"path": str(tiny_model)},
            "cluster": {"device": "cpu", "address": standing_ray.address},
            "rollout": {"max_prompt_tokens": 128, "max_completion_tokens": 64},
            "tasks": [write_rows(tmp_path / "rows.parquet", "What is 6 times 7?")],
            "agent": {"tool_file": str(tmp_path / "tools.yaml"), "chat_template": "chatml_hermes"},
        }
    )


def test_a_server_that_is_down_at_the_start_is_told_by_name_and_the_hours_of_the_start_are_counted(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "open_cluster", partial(open_cluster, stand_ins=stand_ins()))
    monkeypatch.setattr(budget, "counting", partial(budget.counting, tick_s=0.05))
    priced = config.model_copy(update={"budget": BudgetSection(node_hour=3600.0)})
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        loop.run_training(priced)

    assert read_costs(Path(config.run.output_dir) / config.run.name)["node"] > 0.5
