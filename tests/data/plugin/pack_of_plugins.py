"""What a package that extends rayapp may look like: one plug-in of each kind. Installed by tests as a wheel."""

import rayapp
from support.fake_sandboxes import FakeProvider

DOUBLE = rayapp.CodingTask(
    name="double",
    prompt="Write double(x).",
    func_name="double",
    signature="def double(x):",
    tests=("1", "2"),
    reference="2 * x",
)


def short(data_source, solution_str, ground_truth, extra_info=None):
    return -float(len(solution_str))


class Dice(rayapp.ToolBase):
    schema = rayapp.ToolSchema(name="roll")

    async def execute(self, state, arguments):
        return rayapp.ToolOutput(text="4")


class Lines:
    def __init__(self, config, folder, first_step):
        self.file = folder / "lines.txt"

    def log(self, step, metrics):
        with self.file.open("a") as file:
            file.write(f"{step}\n")

    def close(self):
        pass


def reinforce(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
    return -(log_prob * advantages * response_mask).sum() / config.global_batch_info["batch_num_tokens"], {}


def plain(token_level_rewards, response_mask, index, config, **more):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


def provider(options):
    return FakeProvider(**options)


class Doubting:
    """Plays as the tool agent does."""

    def __init__(self, tool_agent):
        self.tool_agent = tool_agent

    async def run(self, prompt, *, engine, sampling, request_id):
        return await self.tool_agent.run(prompt, engine=engine, sampling=sampling, request_id=request_id)
