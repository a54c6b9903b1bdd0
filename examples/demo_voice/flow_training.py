"""Training of the flow by conditional flow matching.

The flow learns the velocity of straight lines from noise to mel.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from examples.demo_voice.corpus import MEL_PER_TOKEN, Utterances
from examples.demo_voice.ear import Ear
from examples.demo_voice.front_end import Heard
from examples.demo_voice.tokenizer_training import Autoencoder, audible, distance
from examples.demo_voice.training import Training, crops
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3.config import FlowConfig
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.dit import AdaNorm
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.ode import solver_times

_LENGTHS = (50, 75, 100, 200)  # tokens of a crop; one length for each batch
_BATCH_TOKENS = 600
# probability that all conditions of a crop are zero, for classifier-free guidance
_CONDITION_DROPOUT = 0.2
_LONGEST_PROMPT = 0.3  # share of a crop
_SIGMA_MIN = 1e-6
# The target is an average of the recording (share 1 - _DRAWN) and of the mel that the tokenizer's
# decoder computes from the tokens. The decoder's mel has less random detail.
_DRAWN = 0.5
# Share of batches whose state is the end of the first ODE step (without guidance), and no point of
# the straight line. In inference, the second step starts from such a state.
_SOLVED = 0.5
_UNTOLD = 0.5  # weight of errors in crops without conditions
_EAR_WEIGHT = 4.0
_INITIAL_GAIN = 0.02  # scale of the first weights of AdaNorm; a block begins close to the identity


class FlowTraining(Training):
    """Training of the flow on crops of the corpus.

    A crop may span several recordings, as an utterance follows its prompt.

    Args:
        config: sizes of the flow.
        corpus: recordings with their features.
        heard: tokens and speaker embeddings of the recordings, and the network of the tokenizer.
        ear: trained ear.
    """

    name = "flow"
    learning_rate = 1e-3
    full_rate_steps = 5000
    bfloat16 = True

    def __init__(self, config: FlowConfig, corpus: Utterances, heard: Heard, ear: Ear) -> None:
        torch.manual_seed(0)
        self._ear = ear
        self._config = config
        self._second_time = float(solver_times(config.n_timesteps)[0][1])
        self._tokens = torch.from_numpy(heard.tokens).long()
        self._mel = torch.from_numpy(corpus.mel)
        self._target = self._mel.float().lerp_(heard.network.drawn(self._tokens), _DRAWN).half()
        self._ends = torch.from_numpy(np.cumsum(corpus.tokens))
        self._speakers = torch.from_numpy(heard.speakers)
        self._flow = self.network = Flow(config)
        self._audible = audible(heard.network.expected(self._tokens))  # (N, 80)
        self._initialise(heard.network)

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        rng = generator
        length = min(
            _LENGTHS[int(torch.randint(len(_LENGTHS), (), generator=rng))], len(self._tokens) // 2
        )
        batch = max(1, _BATCH_TOKENS // length)
        last, streaming = (
            bool(torch.rand((), generator=rng) < 0.2),
            bool(torch.rand((), generator=rng) < 0.5),
        )
        starts = self._starts(batch, length, last, rng)
        first_frames = [MEL_PER_TOKEN * at for at in starts.tolist()]
        mel, recorded = (
            crops(source, first_frames, MEL_PER_TOKEN * length).transpose(1, 2)
            for source in (self._target, self._mel)
        )
        mu, spk = self._mu(starts, length, last, rng)
        prompt = self._prompt(recorded, rng)
        condition_mask = (torch.rand(batch, generator=rng) >= _CONDITION_DROPOUT).float()
        mu, prompt, spk = (
            mu * condition_mask[:, None, None],
            prompt * condition_mask[:, None, None],
            spk * condition_mask[:, None],
        )

        noise = torch.randn(mel.shape, generator=rng)
        if torch.rand((), generator=rng) < _SOLVED:
            with torch.no_grad():
                velocity = self._velocity(noise, mu, spk, prompt, torch.zeros(batch), streaming)
            t = torch.full((batch,), self._second_time)
            state = noise + self._second_time * velocity
            target = (mel - state) / (1 - self._second_time)
        else:
            t = 1 - torch.cos(0.5 * math.pi * torch.rand(batch, generator=rng))
            at = t[:, None, None]
            state = (1 - (1 - _SIGMA_MIN) * at) * noise + at * mel
            target = mel - (1 - _SIGMA_MIN) * noise
        velocity = self._velocity(state, mu, spk, prompt, t, streaming)
        error = (velocity - target).transpose(1, 2)
        velocity_loss = distance(error * self._weight(starts, length, condition_mask))
        # One Euler step from t to 1, as in the last of two ODE steps.
        made = state + (1 - t[:, None, None]) * velocity
        conditioned = condition_mask > 0
        ear_loss = torch.zeros(())
        if conditioned.any():
            ear_loss = self._ear.feature_distance(made[conditioned], recorded[conditioned])
        return {
            "velocity": velocity_loss,
            "ear": ear_loss,
            "loss": velocity_loss + _EAR_WEIGHT * ear_loss,
        }

    def _starts(self, batch: int, length: int, last: bool, rng: torch.Generator) -> torch.Tensor:
        """Draws the first tokens of crops: at random, or so that crops end with a recording."""
        if last:
            ends = self._ends[self._ends >= length]
            return ends[torch.randint(len(ends), (batch,), generator=rng)] - length
        return torch.randint(
            len(self._tokens) - length - self._config.pre_lookahead_len, (batch,), generator=rng
        )

    def _mu(
        self, starts: torch.Tensor, length: int, last: bool, rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes mu (B, 80, T) and speaker (B, 80)."""
        right = 0 if last else self._config.pre_lookahead_len
        mu = self._flow.mu(self._tokens[starts[:, None] + torch.arange(length + right)], last=last)
        chosen = self._speakers[torch.randint(len(self._speakers), (len(starts),), generator=rng)]
        return mu, self._flow.speaker(chosen)

    def _weight(
        self, starts: torch.Tensor, length: int, condition_mask: torch.Tensor
    ) -> torch.Tensor:
        """Returns weights of errors (B, T, 80): the audibility of the expected mel.

        The weights depend on the tokens only, so the mean of all possible mels still has the least
        loss of velocity. Without conditions, all errors of a crop have the same weight.
        """
        weight = crops(self._audible, starts.tolist(), length)
        weight = torch.where(condition_mask[:, None, None] > 0, weight, _UNTOLD)
        return weight.repeat_interleave(MEL_PER_TOKEN, dim=1)

    @staticmethod
    def _prompt(mel: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Returns prompts (B, 80, T): the beginning of the mel in half of the crops, else zeros."""
        batch, _, frames = mel.shape
        share = (
            torch.rand(batch, generator=rng)
            * _LONGEST_PROMPT
            * (torch.rand(batch, generator=rng) < 0.5)
        )
        shown = torch.arange(frames)[None] < (share * frames).long()[:, None]
        return mel * shown[:, None]

    def _velocity(
        self,
        state: torch.Tensor,
        mu: torch.Tensor,
        spk: torch.Tensor,
        prompt: torch.Tensor,
        t: torch.Tensor,
        streaming: bool,
    ) -> torch.Tensor:
        estimator, frames = self._flow.estimator, state.shape[2]
        rope = estimator.rotary_embed(torch.arange(frames))
        bias = (
            attention_bias(block_mask(BlockGrid(estimator.block_frames), frames))
            if streaming
            else None
        )
        return estimator.velocity(
            state,
            estimator.project_conditions(mu, spk, prompt),
            estimator.modulation(t),
            bias,
            rope=rope,
        )

    @torch.no_grad()
    def _initialise(self, network: Autoencoder) -> None:
        """Sets first weights that leave little to learn.

        The embedding of tokens comes from the tokenizer, the blocks of the DiT are close to the
        identity, and the output has the mean of the mel.
        """
        flow = self._flow
        flow.input_embedding.weight.copy_(network.embedding())
        assert flow.pre_lookahead_layer is not None
        flow.pre_lookahead_layer.load_state_dict(network.pre_lookahead.state_dict())
        estimator = flow.estimator
        for module in estimator.modules():
            if isinstance(module, AdaNorm):
                module.linear.weight.mul_(_INITIAL_GAIN)
                module.linear.bias.zero_()
        estimator.proj_out.bias.copy_(network.average)
