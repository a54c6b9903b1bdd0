"""Published formats of sizes: where a configuration file has each field of a dataclass.

A family declares a `Format` for each format of its models. `Format.read` is the only reader. It
uses every key of a section, skips the keys that are known to be without effect, and refuses any
other key by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from token2wav.config.values import from_mapping, kinds, shown
from token2wav.errors import ConfigError

SizesT = TypeVar("SizesT")

# Keys that any configuration of `transformers` may have, for training, generation and bookkeeping
_TRANSFORMERS = """
    _name_or_path _commit_hash architectures auto_map model_type processor_class dtype torch_dtype
    transformers_version *attn_implementation* attention_implementation return_dict torchscript
    output_hidden_states output_attentions use_bfloat16 use_cache is_encoder_decoder is_decoder
    add_cross_attention tie_encoder_decoder cross_attention_hidden_size pruned_heads
    chunk_size_feed_forward problem_type finetuning_task id2label label2id task_specific_params
    tokenizer_class prefix *_token_id tie_word_embeddings tf_legacy_loss initializer_range
    attention_dropout max_position_embeddings max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty *no_repeat_ngram_size bad_words_ids num_return_sequences
    output_scores return_dict_in_generate *suppress_tokens exponential_decay_length_penalty
    remove_invalid_values
"""
TRANSFORMERS = tuple(_TRANSFORMERS.split())
# Rotary positions, in the place that they have since `transformers` 5, or in the older one
ROPE_THETA = {"rope_theta": ("rope_parameters.rope_theta", "rope_theta")}
ROPE_TYPES = {
    f"{section}.{key}": "default"
    for section in ("rope_parameters", "rope_scaling")
    for key in ("rope_type", "type")
}


# Sizes of `SymmetricSizes` in the package `descript-audio-codec`, and in the package `snac`
DESCRIPT_NAMES: dict[str, str | tuple[str, ...]] = {
    "encoder_hidden_size": "encoder_dim",
    "downsampling_ratios": "encoder_rates",
    "hidden_size": "latent_dim",
    "decoder_hidden_size": "decoder_dim",
    "upsampling_ratios": "decoder_rates",
}


@dataclass(frozen=True)
class Format:
    """Published format of the sizes of a decoder.

    Attributes:
        section: path of the object with the sizes, such as `model.codec_config`; empty for the
            whole file. Keys outside of it belong to other networks.
        optional: whether the section may be missing. All sizes then have their defaults.
        names: path of a field below the section, if it has another name there; or several paths, of
            which one suffices, and which must agree. A path that begins with `/` begins at the
            file. An empty tuple stands for a field that the format does not have.
        defaults: values of fields that the file omits, if the dataclass has others.
        only: the only supported value of further keys, by path.
        without_effect: paths of keys that have no effect on the decoder, such as those of training
            and encoder. `*` stands for any text.
        prepare: converts the section to another form before it is read.
    """

    section: str = ""
    optional: bool = False
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def read(self, sizes: type[SizesT], document: Mapping[str, Any]) -> SizesT:
        """Reads the sizes from the content of a file.

        Raises:
            ConfigError: a value is missing, of another type, out of range, of an unsupported
                variant, or does not fit another one; or a key is unknown.
        """
        section = _at(document, self.section) if self.section else document
        if section is None and self.optional:
            section = {}
        if not isinstance(section, dict):
            kind = f", got {type(section).__name__}" if section is not None else ""
            raise ConfigError(
                f"{self.section}: expected an object{kind}; this folder has no decoder"
            )
        if self.prepare is not None:
            section = self.prepare(section)
        values = dict(self.defaults)
        labels: dict[str, str] = {}
        used, filled = {*self.only}, set[str]()
        for name in kinds(sizes):
            paths = self.names.get(name, name)
            for path in (paths,) if isinstance(paths, str) else paths:
                used.add(path)
                label = labels.setdefault(name, self._label(path))
                owner = document if path.startswith("/") else section
                if (value := _at(owner, path.removeprefix("/"), _ABSENT)) is _ABSENT:
                    continue
                if name in filled and value != values[name]:
                    raise ConfigError(
                        f"{self._label(path)}: {shown(value)}, but {label} is "
                        f"{shown(values[name])}; they must be equal"
                    )
                if name not in filled:
                    values[name], labels[name] = value, self._label(path)
                    filled.add(name)
        for path in _unknown(section, "", used, self.without_effect):
            near = get_close_matches(path, used, 1)
            hint = f"did you mean {self._label(near[0])}? Correct" if near else "correct"
            raise ConfigError(f"{self._label(path)}: unknown key; {hint} or remove it")
        for path, only in self.only.items():
            if (value := _at(section, path, only)) != only:
                raise ConfigError(
                    f"{self._label(path)}: {shown(value)} is not supported; expected {shown(only)}"
                )
        try:
            return from_mapping(sizes, values, "", labels)
        except ConfigError as error:  # a relation names a field
            name, colon, rest = str(error).partition(": ")
            raise ConfigError(f"{labels.get(name, name)}{colon}{rest}") from error

    def _label(self, path: str) -> str:
        """Returns the path of a key in the file."""
        if path.startswith("/") or not self.section:
            return path.removeprefix("/")
        return f"{self.section}.{path}"


# Format of Mimi, and of codecs that copied it, in `transformers`
MIMI = Format(
    names={**ROPE_THETA, "frame_rate": ("frame_rate", "_frame_rate")},  # the second is newer
    only=ROPE_TYPES,
    without_effect=(
        *(*TRANSFORMERS, "layer_scale_initial_scale", "normalize", "use_streaming"),
        # The last is null in the folder of a model that was saved without its encoder.
        *("encodec_frame_rate", "frame_size", "encoder_config"),
    ),
)

_ABSENT = object()


def _at(document: Any, path: str, default: Any = None) -> Any:
    """Returns the value at a path such as `model.data`; `default` if there is none."""
    for key in path.split("."):
        if not isinstance(document, dict) or key not in document:
            return default
        document = document[key]
    return document


def _unknown(
    section: Mapping[str, Any], start: str, used: Set[str], without_effect: tuple[str, ...]
) -> Iterator[str]:
    """Yields the paths of keys that are neither used nor without effect."""
    for key, value in section.items():
        path = f"{start}{key}"
        if path in used or any(fnmatchcase(path, pattern) for pattern in without_effect):
            continue
        inside = any(other.startswith(f"{path}.") for other in (*used, *without_effect))
        if inside and isinstance(value, dict):
            yield from _unknown(value, f"{path}.", used, without_effect)
        elif not inside:
            yield path
        elif value is not None:
            raise ConfigError(f"{path}: expected an object, got {type(value).__name__}")
