"""Training of the flow by conditional flow matching.

The flow learns the velocity of straight lines from noise to mel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from lab.demo_voice.corpus import Utterances
from lab.demo_voice.ear import Ear
from lab.demo_voice.front_end import Heard
from lab.demo_voice.tokenizer_training import Autoencoder, audible, distance
from lab.demo_voice.training import Training, crops
from token2wav.config.block_grid import BlockGrid
from token2wav.families.cosyvoice3 import FlowConfig
from token2wav.families.cosyvoice3.flow import Flow
from token2wav.networks.dit import AdaNorm
from token2wav.networks.masks import attention_bias, block_mask
from token2wav.networks.ode import solver_times
from token2wav_server.demo.speaker import MEL_PER_TOKEN

_LENGTHS = (50, 75, 100, 200, 300)  # tokens of a crop; one length for each batch
_BATCH_TOKENS, _GPU_BATCH_TOKENS = 600, 9600
# probability that all conditions of a crop are zero, for classifier-free guidance
_CONDITION_DROPOUT = 0.2
_LONGEST_PROMPT = 0.3  # share of a crop
_SIGMA_MIN = 1e-6
# The target is an average of the recording (share 1 - _DRAWN) and of the mel that the tokenizer's
# decoder computes from the tokens. The decoder's mel has less random detail.
_DRAWN = 0.5
# Half of the batches train the second of two ODE steps: their state is the result of a first step.
_SECOND_STEPS = 0.5
# Share of second-step batches with guidance in the first step, and share with conditions for every
# crop there. A guided second step reads two velocities of one state: with and without conditions.
_GUIDED, _ALL_CONDITIONED = 0.5, 0.5
_FROM_NOISE = 0.5  # share of time 0 among the other batches, as in a first step
_UNCONDITIONAL_WEIGHT = 0.5  # weight of errors in crops without conditions
_EAR_WEIGHT = 4.0
_INITIAL_GAIN = 0.02  # scale of the first weights of AdaNorm; a block begins close to the identity


class Conditions(NamedTuple):
    """Conditions of crops: mu (B, 80, T), speaker (B, 80), and prompt (B, 80, T)."""

    mu: torch.Tensor
    speaker: torch.Tensor
    prompt: torch.Tensor

    def masked(self, mask: torch.Tensor) -> Conditions:
        """Multiplies the conditions of each crop by its number in the mask (B,)."""
        column = mask[:, None]
        return Conditions(
            self.mu * column[..., None], self.speaker * column, self.prompt * column[..., None]
        )


class FlowTraining(Training):
    """Training of the flow on crops of the corpus.

    A crop may span several recordings, as an utterance follows its prompt.

    Args:
        config: sizes of the flow.
        corpus: recordings with their features.
        heard: tokens and speaker embeddings of the recordings, and the network of the tokenizer.
        ear: trained ear.
        device: device of torch. A GPU has batches of 9,600 tokens in place of 600.
    """

    name = "flow"
    learning_rate = 1e-3
    full_rate_steps = 5000

    def __init__(
        self, config: FlowConfig, corpus: Utterances, heard: Heard, ear: Ear, device: str = "cpu"
    ) -> None:
        torch.manual_seed(0)
        self.bfloat16 = device == "cpu"
        self._device = torch.device(device)
        self._batch_tokens = _BATCH_TOKENS if device == "cpu" else _GPU_BATCH_TOKENS
        self._ear = ear.to(device)
        self._config = config
        self._second_time = float(solver_times(config.n_timesteps)[0][1])
        tokens, mel = torch.from_numpy(heard.tokens).long(), torch.from_numpy(corpus.mel)
        target = mel.float().lerp_(heard.network.drawn(tokens), _DRAWN).half()
        self._tokens, self._mel, self._target = (x.to(device) for x in (tokens, mel, target))
        self._ends = torch.from_numpy(np.cumsum(corpus.tokens))
        self._speakers = torch.from_numpy(heard.speakers).to(device)
        self._audible = audible(heard.network.expected(tokens)).to(device)  # (N, 80)
        self._flow = Flow(config)
        self._initialise(heard.network)
        self.network = self._flow.to(device)

    def losses(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        rng, device = generator, self._device
        length = min(
            _LENGTHS[int(torch.randint(len(_LENGTHS), (), generator=rng))], len(self._tokens) // 2
        )
        batch = max(1, self._batch_tokens // length)
        last, streaming = _happens(0.2, rng), _happens(0.5, rng)
        starts = self._starts(batch, length, last, rng)
        mel, recorded = (
            crops(source, MEL_PER_TOKEN * starts, MEL_PER_TOKEN * length).transpose(1, 2)
            for source in (self._target, self._mel)
        )
        mu, speaker = self._mu(starts, length, last, rng)
        conditions = Conditions(mu, speaker, self._prompt(recorded, rng))
        condition_mask = (torch.rand(batch, generator=rng) >= _CONDITION_DROPOUT).float().to(device)
        masked = conditions.masked(condition_mask)

        noise = torch.randn(mel.shape, generator=rng).to(device)
        if _happens(_SECOND_STEPS, rng):
            guidance = self._config.inference_cfg_rate if _happens(_GUIDED, rng) else 0.0
            first_conditions = conditions if _happens(_ALL_CONDITIONED, rng) else masked
            state = self._after_first_step(noise, first_conditions, guidance, streaming)
            t = torch.full((batch,), self._second_time, device=device)
            target = (mel - state) / (1 - self._second_time)
        else:
            t = 1 - torch.cos(0.5 * math.pi * torch.rand(batch, generator=rng)).to(device)
            if _happens(_FROM_NOISE, rng):
                t = torch.zeros_like(t)
            at = t[:, None, None]
            state = (1 - (1 - _SIGMA_MIN) * at) * noise + at * mel
            target = mel - (1 - _SIGMA_MIN) * noise
        velocity = self._velocity(state, masked, t, streaming)
        error = (velocity - target).transpose(1, 2)
        velocity_loss = distance(error * self._weight(starts, length, condition_mask))
        # One Euler step from t to 1, as in the last of two ODE steps.
        made = state + (1 - t[:, None, None]) * velocity
        conditioned = condition_mask > 0
        ear_loss = torch.zeros((), device=device)
        if conditioned.any():
            ear_loss = self._ear.feature_distance(made[conditioned], recorded[conditioned])
        return {
            "velocity": velocity_loss,
            "ear": ear_loss,
            "loss": velocity_loss + _EAR_WEIGHT * ear_loss,
        }

    @torch.no_grad()
    def _after_first_step(
        self, noise: torch.Tensor, conditions: Conditions, guidance: float, streaming: bool
    ) -> torch.Tensor:
        """Computes the state after the first of two ODE steps."""
        t = noise.new_zeros(len(noise))
        velocity = self._velocity(noise, conditions, t, streaming)
        if guidance:
            without = conditions.masked(torch.zeros_like(t))
            unconditional = self._velocity(noise, without, t, streaming)
            velocity = (1 + guidance) * velocity - guidance * unconditional
        return noise + self._second_time * velocity

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
        index = starts[:, None] + torch.arange(length + right)
        mu = self._flow.mu(self._tokens[index.to(self._device)], last=last)
        chosen = torch.randint(len(self._speakers), (len(starts),), generator=rng)
        return mu, self._flow.speaker(self._speakers[chosen.to(self._device)])

    def _weight(
        self, starts: torch.Tensor, length: int, condition_mask: torch.Tensor
    ) -> torch.Tensor:
        """Returns weights of errors (B, T, 80): the audibility of the expected mel.

        The weights depend on the tokens only, so the mean of all possible mels still has the least
        loss of velocity. Without conditions, all errors of a crop have the same weight.
        """
        weight = crops(self._audible, starts, length)
        weight = torch.where(condition_mask[:, None, None] > 0, weight, _UNCONDITIONAL_WEIGHT)
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
        return mel * shown[:, None].to(mel.device)

    def _velocity(
        self, state: torch.Tensor, conditions: Conditions, t: torch.Tensor, streaming: bool
    ) -> torch.Tensor:
        estimator, frames = self._flow.estimator, state.shape[2]
        rope = estimator.rotary_embed(torch.arange(frames, device=state.device))
        bias = (
            attention_bias(block_mask(BlockGrid(estimator.block_frames), frames, state.device))
            if streaming
            else None
        )
        return estimator.velocity(
            state,
            estimator.project_conditions(*conditions),
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


def _happens(probability: float, rng: torch.Generator) -> bool:
    return bool(torch.rand((), generator=rng) < probability)
