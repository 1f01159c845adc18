"""What a package that extends rayapp may look like: one plug-in of each kind. Installed by tests as a wheel."""

from support.fake_sandboxes import FakeProvider


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
